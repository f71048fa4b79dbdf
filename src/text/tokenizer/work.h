// What one encoding, one decoding or one load may spend: tokenizer files come from anywhere, and a
// chain of steps that each double their text, or a regular expression that backtracks for ever,
// must end. All steps draw on one budget in proportion to the text that came in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "omnikv/status.h"
#include "text/tokenizer/regex.h"

namespace omnikv::tok {

// How a step fails, inside this library only: Tokenizer turns it into a Status.
struct WorkError {
  StatusCode code;
  std::string message;  // names the step, not the file
};

// The error as a sentence that begins with the step's name, where it has one.
Status ToStatus(const WorkError& error, std::string_view step);

// A step of a chain, and where its file says so.
template <typename Step>
struct NamedStep {
  std::unique_ptr<const Step> run;
  std::string name;
};

class Work {
 public:
  // Published tokenizers take below ten passes over a text, and grow it to three times its size.
  static constexpr size_t kPerByte = 64;
  static constexpr size_t kAtLeast = size_t{16} << 20;

  explicit Work(size_t given = 0) { Grant(given); }

  // More text came in.
  void Grant(size_t bytes) {
    given_ += bytes;
    left_ += kPerByte * bytes;
    regex_.Grant(bytes);
  }
  // What follows is done by `step`, a name that outlives it; empty: by none.
  void At(std::string_view step) { step_ = step; }
  // Throws WorkError unless a step may make `bytes` more bytes of text, or do as much work.
  void Draw(size_t bytes) {
    if (bytes > left_) Overrun();
    left_ -= bytes;
  }
  // For `bytes` bytes that were looked at one by one.
  void Walked(size_t bytes) {
    if (bytes >= 16) Draw(bytes / 8);
  }

  RegexScratch* regex() { return &regex_; }
  std::string_view step() const { return step_; }

 private:
  [[noreturn]] void Overrun() const;

  size_t given_ = 0;
  size_t left_ = kAtLeast;
  std::string_view step_;
  RegexScratch regex_;
};

}  // namespace omnikv::tok
