// Stop strings over a stream of text: what may be the beginning of one is held back.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace omnikv {

class StopText {
 public:
  explicit StopText(std::vector<std::string> stops) : stops_(std::move(stops)) {
    stops_.erase(std::remove(stops_.begin(), stops_.end(), std::string()), stops_.end());
  }

  // Takes new text; returns what can be shown of all text so far. Nothing after a stop string.
  std::string Push(const std::string& text) {
    if (stopped_) return "";
    held_ += text;
    size_t cut = std::string::npos;
    for (const std::string& stop : stops_) {
      const size_t at = held_.find(stop);
      if (at >= cut) continue;
      cut = at;
      stop_ = stop;
    }
    if (cut != std::string::npos) {
      stopped_ = true;
      return std::exchange(held_, "").substr(0, cut);
    }
    size_t keep = 0;  // the longest end of the text that begins a stop string
    for (const std::string& stop : stops_) {
      for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
        if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) keep = n;
      }
    }
    std::string shown = held_.substr(0, held_.size() - keep);
    held_.erase(0, held_.size() - keep);
    return shown;
  }

  // The text ended: what was held back, unless a stop string came.
  std::string Flush() { return stopped_ ? "" : std::exchange(held_, ""); }

  bool stopped() const { return stopped_; }
  // The text that stopped it, the first of those that begin there; empty: none.
  const std::string& stop() const { return stop_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  std::string stop_;
  bool stopped_ = false;
};

}  // namespace omnikv
