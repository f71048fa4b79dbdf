// The library's version; set from CMake's project version (a test compares them).
#pragma once

#define OMNIKV_VERSION_MAJOR 0
#define OMNIKV_VERSION_MINOR 1
#define OMNIKV_VERSION_PATCH 0
#define OMNIKV_VERSION "0.1.0"
