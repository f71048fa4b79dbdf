// The files of segments in the folder of a store, and which of them are wanted
// (docs/decisions/085).
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

// Several processes may have the folder. A segment that no context of this process needs may be one
// that another process is about to name in the file of a context: it claims it before, by the time
// at which the file was changed last. So a segment is deleted where its time is the one that this
// process knows, or is long ago; else it is left for later. Thread-compatible.
class SegmentFiles {
 public:
  explicit SegmentFiles(std::string folder) : folder_(std::move(folder)) {}

  static constexpr const char* kSuffix = ".seg";
  std::string PathOf(const std::string& name) const;

  // A file that is there, of which nothing is known. One of another version is left alone.
  void Found(const std::string& name);

  // Another context, of a file or on its way, needs these, or does not any more.
  void Need(std::span<const std::string> names);
  void Release(std::span<const std::string> names);
  // Whether others need it beside the one that asks.
  bool NeededByOthers(const std::string& name) const;
  // Claims the file; false where it is not there, or no segment of this version. Reads nothing of
  // what is known here, so it may run beside the other calls.
  bool Claim(const std::string& name) const;
  // Looks again at a file after Claim, which said whether it was claimed. Returns whether it is
  // still there.
  bool Claimed(const std::string& name, bool claimed);
  // It was written by this process.
  void Wrote(const std::string& name);
  // Its file is damaged: it goes, whoever needs it.
  void Remove(const std::string& name);

  // Those that nothing needs, as far as is known here.
  std::vector<std::string> Unneeded() const;
  // Gives up those of them that nothing needs, unless `named` has them, or another process may be
  // about to name them. The caller deletes the files that it returns.
  std::vector<std::string> GiveUp(std::span<const std::string> names,
                                  const std::unordered_set<std::string>& named);

  uint64_t bytes() const { return bytes_; }  // of all that are there
  uint64_t BytesOf(std::span<const std::string> names) const;
  int64_t size() const { return there_; }  // files

 private:
  using Time = std::filesystem::file_time_type;
  struct Segment {
    bool there = false;
    uint64_t bytes = 0;  // of the file
    int64_t needed = 0;  // by so many contexts
    Time known = {};     // the file's last change
    bool named = false;  // a context needed it once: nobody else was about to, then
  };
  // ok: the file is there, and is a segment of this version.
  Status Check(const std::string& name) const;
  // The file, as it is now; not there: what was known of it goes.
  void Look(const std::string& name, Segment& segment);
  void Gone(Segment& segment);

  std::string folder_;
  std::unordered_map<std::string, Segment> segments_;
  uint64_t bytes_ = 0;
  int64_t there_ = 0;
};

// How long what nobody names yet is left alone.
inline constexpr std::chrono::minutes kMayBeNamed{10};

}  // namespace omnikv
