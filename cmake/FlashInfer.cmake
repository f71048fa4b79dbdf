# Attention over prompts by FlashInfer's kernel for Hopper cards, about twice as fast as our own:
# headers only, from its wheel, which pip fetches from wherever it is set up to (pinned by version and
# hash; nothing of it is installed or run). OMNIKV_FLASHINFER: AUTO (use it where a Hopper card is
# among the architectures and the wheel can be had), ON (an error without) or OFF.
# OMNIKV_DOWNLOADS keeps the wheel for other builds; one put there by hand is taken as well.
set(OMNIKV_FLASHINFER AUTO CACHE STRING "FlashInfer's kernel for prompts on Hopper: AUTO, ON or OFF")
set(OMNIKV_DOWNLOADS ${PROJECT_SOURCE_DIR}/build/downloads CACHE PATH "Where downloads are kept")
set(OMNIKV_HAVE_FLASHINFER OFF)

set(flashinfer_version 0.7.2.post1)
set(flashinfer_sha256 bfdc18b9e1e4d8d0730fe4343dc0e284cd0c160086de80f99888bc4867922d49)
set(OMNIKV_FLASHINFER_DIR ${PROJECT_BINARY_DIR}/flashinfer-${flashinfer_version})

# Sets `reason` where the headers cannot be had.
function(omnikv_get_flashinfer reason)
  set(${reason} "" PARENT_SCOPE)
  if(EXISTS ${OMNIKV_FLASHINFER_DIR}/complete)
    return()
  endif()
  set(wheel ${OMNIKV_DOWNLOADS}/flashinfer_python-${flashinfer_version}-py3-none-any.whl)
  set(found "")
  if(EXISTS ${wheel})
    file(SHA256 ${wheel} found)
  endif()
  if(NOT found STREQUAL flashinfer_sha256)
    message(STATUS "FlashInfer: fetching its headers (62 MB), into ${OMNIKV_DOWNLOADS}")
    file(REMOVE ${wheel})
    set(pin ${PROJECT_BINARY_DIR}/flashinfer.txt)
    file(WRITE ${pin}
         "flashinfer-python==${flashinfer_version} --hash=sha256:${flashinfer_sha256}\n")
    execute_process(
      COMMAND python3 -m pip download --quiet --disable-pip-version-check --no-deps
              --require-hashes --only-binary=:all: --ignore-requires-python --retries 1 --timeout 20
              --dest ${OMNIKV_DOWNLOADS} --requirement ${pin}
      RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said TIMEOUT 600)
    if(NOT failed EQUAL 0 OR NOT EXISTS ${wheel})
      string(STRIP "${said}" said)
      string(REGEX REPLACE "^.*\n" "" said "${said}")  # its last line
      set(${reason} "pip could not fetch it (${said})" PARENT_SCOPE)
      return()
    endif()
  endif()
  file(REMOVE_RECURSE ${OMNIKV_FLASHINFER_DIR})
  file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${OMNIKV_FLASHINFER_DIR}
       PATTERNS "flashinfer/data/include/*" "flashinfer/data/cutlass/include/*"
                "flashinfer/data/cutlass/tools/util/include/*" "*/licenses/LICENSE")
  file(TOUCH ${OMNIKV_FLASHINFER_DIR}/complete)
endfunction()

if(OMNIKV_HAVE_CUDA AND NOT OMNIKV_FLASHINFER STREQUAL "OFF")
  if(NOT OMNIKV_CUDA_ARCHS MATCHES "90a")
    set(reason "no Hopper card (90a) is among the architectures")
  elseif(CUDAToolkit_VERSION VERSION_LESS 12.8)
    set(reason "it needs CUDA 12.8")
  else()
    omnikv_get_flashinfer(reason)
  endif()
  if(reason STREQUAL "")
    set(OMNIKV_HAVE_FLASHINFER ON)
    message(STATUS "FlashInfer: on, ${flashinfer_version}")
  elseif(OMNIKV_FLASHINFER STREQUAL "ON")
    message(FATAL_ERROR "OMNIKV_FLASHINFER is ON, but ${reason}")
  else()
    message(STATUS "FlashInfer: off, ${reason}: prompts take our own attention, slower on Hopper")
  endif()
endif()

# omnikv_flashinfer_library(NAME SOURCES ...): instances of its kernel. A file takes some minutes
# and 3.4 GB to compile: one at a time.
function(omnikv_flashinfer_library name)
  cmake_parse_arguments(arg "" "" "SOURCES" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS omnikv_large=1)
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES 90a-real
                                           JOB_POOL_COMPILE omnikv_large)
  set(data ${OMNIKV_FLASHINFER_DIR}/flashinfer/data)
  target_include_directories(${name} SYSTEM PRIVATE ${data}/include ${data}/cutlass/include
                                                    ${data}/cutlass/tools/util/include)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(${name} PRIVATE NDEBUG CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
                                             FLASHINFER_ENABLE_BF16 FLASHINFER_ENABLE_F16)
  # Its headers are not free of warnings.
  target_compile_options(${name} PRIVATE -O3 -use_fast_math --expt-relaxed-constexpr -w)
  target_link_libraries(${name} PUBLIC CUDA::cudart_static)
endfunction()
