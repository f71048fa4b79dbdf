// How the files of a store are called, for those who read and write them (context_store.h).
#pragma once

#include <filesystem>

#include "io/checked_file.h"

namespace omnikv {

inline constexpr FileKind kStoredFile = {
    .magic = "omnikvst", .version = 2, .name = "a stored context"};
inline constexpr const char* kContextSuffix = ".ctx";

// Of a context, and that it was pinned.
void RemoveContextFile(const std::filesystem::path& path);

}  // namespace omnikv
