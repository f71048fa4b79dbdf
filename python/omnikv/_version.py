# That of include/omnikv/version.h: CMake refuses another.
__version__ = "0.1.0"
