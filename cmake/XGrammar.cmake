# Answers that fit a JSON schema or a grammar, by xgrammar: its C++ sources from its sdist, which pip
# fetches from wherever it is set up to (pinned by version and hash; nothing of it is installed or
# run). OMNIKV_XGRAMMAR: AUTO (use it where the sources can be had), ON (an error without) or OFF.
# OMNIKV_DOWNLOADS keeps the archive for other builds; one put there by hand is taken as well.
set(OMNIKV_XGRAMMAR AUTO CACHE STRING "Grammars for answers, by xgrammar: AUTO, ON or OFF")
set(OMNIKV_DOWNLOADS ${PROJECT_SOURCE_DIR}/build/downloads CACHE PATH "Where downloads are kept")
set(OMNIKV_HAVE_XGRAMMAR OFF)
set(OMNIKV_XGRAMMAR_DIR ${PROJECT_BINARY_DIR}/xgrammar-src)

if(NOT OMNIKV_XGRAMMAR STREQUAL "OFF")
  set(reason "")
  execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/fetch_xgrammar.sh ${OMNIKV_XGRAMMAR_DIR}
                          ${OMNIKV_DOWNLOADS}
                  RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said TIMEOUT 300)
  if(NOT failed EQUAL 0)
    string(STRIP "${said}" said)
    string(REGEX REPLACE "^.*\n" "" said "${said}")  # its last line
    set(reason "its sources could not be fetched (${said})")
  endif()
  if(reason STREQUAL "")
    set(OMNIKV_HAVE_XGRAMMAR ON)
    message(STATUS "xgrammar: on")
  elseif(OMNIKV_XGRAMMAR STREQUAL "ON")
    message(FATAL_ERROR "OMNIKV_XGRAMMAR is ON, but ${reason}")
  else()
    message(STATUS "xgrammar: off, ${reason}: the server refuses JSON schemas and grammars")
  endif()
endif()

if(OMNIKV_HAVE_XGRAMMAR)
  # Its own CMakeLists.txt turns on -Werror and -flto for everybody, so it is not used.
  file(GLOB_RECURSE xgrammar_sources ${OMNIKV_XGRAMMAR_DIR}/cpp/*.cc)
  add_library(omnikv_xgrammar STATIC ${xgrammar_sources})
  # SYSTEM: its headers are not free of our warnings.
  target_include_directories(omnikv_xgrammar SYSTEM PUBLIC
    ${OMNIKV_XGRAMMAR_DIR}/include ${OMNIKV_XGRAMMAR_DIR}/3rdparty/dlpack/include
    PRIVATE ${OMNIKV_XGRAMMAR_DIR}/3rdparty/picojson)
  # What it would write to stderr goes to src/server/grammar/grammar.cc, which says it in a Status.
  target_compile_definitions(omnikv_xgrammar PRIVATE XGRAMMAR_LOG_CUSTOMIZE=1
                                                     XGRAMMAR_ENABLE_CPPTRACE=0
                                                     XGRAMMAR_ENABLE_INTERNAL_CHECK=0)
  target_compile_options(omnikv_xgrammar PRIVATE -w $<$<CONFIG:Release>:-O2>)
  set_target_properties(omnikv_xgrammar PROPERTIES CXX_STANDARD 17)
  target_link_libraries(omnikv_xgrammar PUBLIC Threads::Threads)
endif()
