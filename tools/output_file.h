// Files of results: there whole, or as they were before.
#pragma once

#include <cstddef>
#include <string>

#include "omnikv/status.h"

namespace omnikv::tools {

// A file that is written beside its place, under an unpredictable name of its own, and moved there
// by Commit. Until then whatever stood there stays; two processes that write one file never mix:
// the last to commit leaves its whole file. What was written beside is removed when the object goes
// without a Commit, when the process exits, and when SIGINT, SIGTERM, SIGHUP or SIGQUIT end it.
//
// - A symbolic link is followed: the file that it leads to is replaced, or made, and the link
// stays.
// - A file that is replaced passes on its permissions, but no owner and no further names (hard
//   links); one that may not be written is refused. A new one gets what the umask leaves.
// - A device, a pipe, and a link of /proc (as /dev/stdout is one) are written as they are.
//
// One thread; at most kMaxOutputFiles at a time.
class OutputFile {
 public:
  // `flag` names the flag that gave `path`, for messages.
  OutputFile(std::string flag, std::string path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // kInvalidArgument or kNotFound, with the reason, when the file cannot be written.
  Status Open();
  // After Open. A failure is kept for Commit.
  void Write(const void* data, size_t bytes);
  // Puts the file in its place; kFailed, with the reason, when a write or this failed.
  Status Commit();

 private:
  Status Refuse(const std::string& why) const;
  Status OpenBeside(const std::string& target);
  void Discard();

  std::string flag_, path_;
  std::string target_;  // what Commit replaces; empty: written as it is
  int fd_ = -1;
  int slot_ = -1;  // of the files that signals remove
  int error_ = 0;  // errno of the first write that failed
};

inline constexpr int kMaxOutputFiles = 64;

}  // namespace omnikv::tools
