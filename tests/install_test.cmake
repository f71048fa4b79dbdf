# Installs the build into a fresh prefix, builds the examples against the package found there, and
# runs them: cmake -DBUILD=... -DSOURCE=... -DWORK=... -P install_test.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN}: ${result}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
run(${CMAKE_COMMAND} -S ${SOURCE}/examples -B ${WORK}/build -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run(${CMAKE_COMMAND} --build ${WORK}/build)
set(prompt "The pass key is 48213. Remember it. 48213 is the pass key. What is the pass key?")
run(${WORK}/build/hello_generate ${WORK}/prefix/share/omnikv/models/omnikv-tiny-q8_0.gguf ${prompt})
if(NOT output MATCHES "48213")
  message(FATAL_ERROR "hello_generate answers '${output}'")
endif()
# A C program, in a project that knows no C++.
run(${CMAKE_COMMAND} -S ${SOURCE}/tests/capi/package -B ${WORK}/c_build -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run(${CMAKE_COMMAND} --build ${WORK}/c_build)
run(${WORK}/c_build/hello ${WORK}/prefix/share/omnikv/models/omnikv-tiny-q8_0.gguf ${prompt})
if(NOT output MATCHES "48213")
  message(FATAL_ERROR "the C program answers '${output}'")
endif()
# The installed program finds the installed model and document by itself.
run(${WORK}/prefix/bin/omnikv run -p ${prompt})
if(NOT output MATCHES "48213")
  message(FATAL_ERROR "omnikv run answers '${output}'")
endif()
if(NOT EXISTS ${WORK}/prefix/share/omnikv/examples/quickstart/document.txt OR
   NOT EXISTS ${WORK}/prefix/share/omnikv/examples/quickstart/facts.json)
  message(FATAL_ERROR "the quickstart's document is not installed")
endif()
