#include "engine/segment_files.h"

#include <system_error>
#include <utility>

#include "engine/context_segments.h"

namespace omnikv {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::string SegmentFiles::PathOf(const std::string& name) const {
  return (fs::path(folder_) / (name + kSuffix)).string();
}

void SegmentFiles::Gone(Segment& segment) {
  if (!segment.there) return;
  bytes_ -= segment.bytes;
  --there_;
  segment.there = false;
}

void SegmentFiles::Look(const std::string& name, Segment& segment) {
  Gone(segment);
  const fs::path path = PathOf(name);
  std::error_code error;
  const uint64_t bytes = fs::file_size(path, error);
  if (!error) segment.known = fs::last_write_time(path, error);
  if (error) return;
  segment.there = true;
  segment.bytes = bytes;
  bytes_ += bytes;
  ++there_;
}

Status SegmentFiles::Check(const std::string& name) const {
  OKV_ASSIGN_OR_RETURN(InputFile input, InputFile::Open(PathOf(name)));
  return CheckedFile::Peek(std::move(input), kSegmentFile).status();
}

void SegmentFiles::Found(const std::string& name) {
  if (segments_.contains(name) || Check(name).code() == StatusCode::kUnsupported) return;
  Look(name, segments_[name]);
}

void SegmentFiles::Need(std::span<const std::string> names) {
  for (const std::string& name : names) {
    Segment& segment = segments_[name];
    if (!segment.there) Look(name, segment);
    ++segment.needed;
    segment.named = true;
  }
}

void SegmentFiles::Release(std::span<const std::string> names) {
  for (const std::string& name : names) {
    const auto found = segments_.find(name);
    if (found == segments_.end()) continue;
    if (--found->second.needed == 0 && !found->second.there) segments_.erase(found);
  }
}

bool SegmentFiles::NeededByOthers(const std::string& name) const {
  const auto found = segments_.find(name);
  return found != segments_.end() && found->second.needed > 1;
}

bool SegmentFiles::Claim(const std::string& name) const {
  if (!Check(name).ok()) return false;
  std::error_code error;
  fs::last_write_time(PathOf(name), fs::file_time_type::clock::now(), error);
  return true;  // one of another user, whose time is not ours to set, is used as it is
}

bool SegmentFiles::Claimed(const std::string& name, bool claimed) {
  Segment& segment = segments_[name];
  if (claimed) {
    Look(name, segment);
  } else {
    Gone(segment);
  }
  return segment.there;
}

void SegmentFiles::Wrote(const std::string& name) {
  Segment& segment = segments_[name];
  segment.named = true;
  Look(name, segment);
}

void SegmentFiles::Remove(const std::string& name) {
  std::error_code error;
  fs::remove(PathOf(name), error);
  if (const auto found = segments_.find(name); found != segments_.end()) Gone(found->second);
}

std::vector<std::string> SegmentFiles::Unneeded() const {
  std::vector<std::string> names;
  for (const auto& [name, segment] : segments_) {
    if (segment.needed == 0) names.push_back(name);
  }
  return names;
}

std::vector<std::string> SegmentFiles::GiveUp(std::span<const std::string> names,
                                              const std::unordered_set<std::string>& named) {
  std::vector<std::string> paths;
  for (const std::string& name : names) {
    const auto found = segments_.find(name);
    if (found == segments_.end() || found->second.needed > 0 || named.contains(name)) continue;
    const std::string path = PathOf(name);
    std::error_code error;
    const Time changed = fs::last_write_time(path, error);
    const bool ours = found->second.named && changed == found->second.known;
    if (!error && !ours && Time::clock::now() - changed < kMayBeNamed) continue;
    if (!error) paths.push_back(path);
    Gone(found->second);
    segments_.erase(found);
  }
  return paths;
}

uint64_t SegmentFiles::BytesOf(std::span<const std::string> names) const {
  uint64_t bytes = 0;
  for (const std::string& name : names) {
    const auto found = segments_.find(name);
    if (found != segments_.end() && found->second.there) bytes += found->second.bytes;
  }
  return bytes;
}

}  // namespace omnikv
