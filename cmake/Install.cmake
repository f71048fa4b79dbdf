# Installs the program, the shared library with the public headers, its CMake package, the shipped
# model and document, and the unit of systemd. `cmake --install BUILD --component program` leaves out
# what only builds on the library need.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

add_library(omnikv_lib SHARED $<TARGET_OBJECTS:omnikv_engine> $<TARGET_OBJECTS:omnikv_capi>)
target_link_libraries(omnikv_lib PRIVATE omnikv_capi)
set_target_properties(omnikv_lib PROPERTIES OUTPUT_NAME omnikv EXPORT_NAME omnikv
                      VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
target_compile_features(omnikv_lib PUBLIC cxx_std_20)
target_include_directories(omnikv_lib INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
add_library(omnikv::omnikv ALIAS omnikv_lib)

install(TARGETS omnikv_lib EXPORT omnikvTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/omnikv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT omnikvTargets NAMESPACE omnikv:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/omnikv
        FILE omnikvConfig.cmake)
write_basic_package_version_file(omnikvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/omnikvConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/omnikv)

install(TARGETS omnikv RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
install(FILES models/omnikv-tiny-q8_0.gguf models/omnikv-tiny-q8_0.duo.tsv
              models/omnikv-tiny-q8_0.kascade.tsv
        DESTINATION ${CMAKE_INSTALL_DATADIR}/omnikv/models COMPONENT program)
install(DIRECTORY examples/quickstart DESTINATION ${CMAKE_INSTALL_DATADIR}/omnikv/examples
        COMPONENT program)
install(FILES LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT program)
# Where systemd looks under /usr and /usr/local, on multiarch systems too.
install(FILES packaging/omnikv.service DESTINATION lib/systemd/system COMPONENT program)
