# Build options, and the flags every target of ours is compiled with.
option(OMNIKV_TESTS "Build the tests" ON)
option(OMNIKV_FUZZ "Build the fuzz targets with libFuzzer (clang only)" OFF)
option(OMNIKV_ONEDNN "Prefill GEMM through oneDNN where the CPU has bf16 instructions" ON)
option(OMNIKV_WERROR "Treat warnings as errors" ON)
# A folder that the user names may be relative to where cmake was started: CACHE PATH resolves it.
set(example_policies "")
if(OMNIKV_TESTS)
  set(example_policies ${PROJECT_SOURCE_DIR}/examples/custom_policy)
endif()
set(OMNIKV_POLICY_DIRS "${example_policies}" CACHE PATH
    "Folders of policies beside src/policy, each with <name>/<name>.cc (docs/policy_guide.md)")
set(OMNIKV_SANITIZE "" CACHE STRING "Sanitizers: empty, address+undefined or thread")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

add_library(omnikv_flags INTERFACE)
target_compile_options(omnikv_flags INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor
                                              -Wno-missing-field-initializers
                                              # the same rounding by every compiler; kernels say
                                              # where they fuse
                                              -ffp-contract=off)
if(OMNIKV_WERROR)
  target_compile_options(omnikv_flags INTERFACE -Werror)
endif()
target_include_directories(omnikv_flags INTERFACE
  $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>
  $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/src>)

if(OMNIKV_SANITIZE STREQUAL "address+undefined")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(OMNIKV_SANITIZE STREQUAL "thread")
  # Boost.Asio has fences, of which the sanitizer knows nothing and GCC warns.
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  add_link_options(-fsanitize=thread)
  set(OMNIKV_ONEDNN OFF CACHE BOOL "" FORCE)  # its OpenMP runtime gives false races
elseif(NOT OMNIKV_SANITIZE STREQUAL "")
  message(FATAL_ERROR "OMNIKV_SANITIZE is '${OMNIKV_SANITIZE}', expected empty, address+undefined or thread")
endif()

if(OMNIKV_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)  # coverage of the libraries guides the fuzzer
endif()

# omnikv_library(NAME SOURCES ... DEPS ...): a static library of one layer, with the house flags.
function(omnikv_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  target_link_libraries(${name} PUBLIC omnikv_flags ${arg_DEPS})
endfunction()

# omnikv_test(NAME SOURCES ... DEPS ...): one gtest binary, each TEST a ctest case of its own. CARD: those
# with "cuda" in their name use the card, one at a time.
function(omnikv_test name)
  cmake_parse_arguments(arg "CARD" "LOCK" "SOURCES;DEPS" ${ARGN})
  set(lock "")
  if(arg_LOCK)
    set(lock RESOURCE_LOCK ${arg_LOCK})
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE omnikv_flags ${arg_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE OMNIKV_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  # Compiles in three quarters of the time of -O3. What tests measure and compare lies in libraries.
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  # Six files a compilation: most of the time goes to headers. So each file has a namespace of its own.
  set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
  set(discover DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 900)
  if(arg_CARD AND OMNIKV_HAVE_CUDA)
    gtest_discover_tests(${name} TEST_FILTER "-*cuda*" ${discover})
    gtest_discover_tests(${name} TEST_FILTER "*cuda*" TEST_LIST ${name}_CARD_TESTS ${discover}
                         RESOURCE_LOCK cuda)
  else()
    gtest_discover_tests(${name} ${discover} ${lock})
  endif()
endfunction()
