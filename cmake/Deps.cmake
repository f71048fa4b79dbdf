# Third-party libraries, all from the distribution (scripts/install_deps.sh installs them). oneDNN
# and OpenBLAS are opened at run time (src/backend/cpu/prefill), not linked: a start of the program
# does not pay for them.
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
pkg_check_modules(EDIT REQUIRED IMPORTED_TARGET libedit)
pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)
find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)  # of which the header is used alone
# Of a few kilobytes, so that no machine needs it besides: the static library where there is one.
find_path(URING_INCLUDE_DIR liburing.h REQUIRED)
find_library(URING_LIBRARY NAMES liburing.a uring REQUIRED)
if(OMNIKV_TESTS)
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()
