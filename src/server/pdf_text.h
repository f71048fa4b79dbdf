// The text of a PDF, by a program that is installed beside the server: pdftotext of poppler.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "omnikv/status.h"

namespace omnikv::server {

struct PdfOptions {
  std::string program = "pdftotext";     // its path, or its name in PATH
  double seconds = 30;                   // that it may take
  size_t most_text = size_t{64} << 20;   // bytes that it may write
  size_t most_memory = size_t{4} << 30;  // bytes that it may take
};

// Whether the program is there.
bool HasPdfText(const PdfOptions& options = {});

// The text, page after page, in UTF-8. The program runs in a process of its own, without a shell,
// gets the PDF as its standard input, and is killed with all that it started once it passes a
// limit. Waits for it: not for a thread that others wait for. Thread-safe.
// kUnsupported where the program is not installed; kInvalidArgument for what is no PDF, one that
// the program cannot read, one without a text, and one that passes a limit.
Result<std::string> PdfText(std::string_view pdf, const PdfOptions& options = {});

}  // namespace omnikv::server
