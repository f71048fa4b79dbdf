// Beast's parser refuses: methods that are no tokens, control characters in the target, versions
// other than 1.0 and 1.1, names of fields with spaces or other characters that are no token's,
// Content-Length that is no number, that differs from another, or that stands beside a chunked
// Transfer-Encoding, and chunk sizes that are no hexadecimal number.
// It lets pass, and ScanHead, on_field_impl and on_header_impl refuse: obs-fold (it joins the
// lines), a line feed alone inside a chunk's extension, any Transfer-Encoding that is not exactly
// "chunked" ("xchunked" has no body, "gzip, chunked" is taken apart halfway), Transfer-Encoding in
// HTTP/1.0, Content-Length "5, 5", and a Host that is missing or repeated. ScanHead also refuses
// control characters while they come, where Beast waits for the end of the head.
#include "server/http/request_reader.h"

#include <algorithm>
#include <boost/beast/http/basic_parser.hpp>
#include <cstdint>
#include <limits>
#include <utility>

#include "base/check.h"

namespace omnikv::server {
namespace {

namespace http = boost::beast::http;
using boost::beast::error_code;
using BeastView = boost::beast::string_view;

std::string_view View(BeastView text) {
  return {text.data(), text.size()};
}

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
  }
  return lower;
}

const char* ParserMessage(const error_code& code) {
  using http::error;
  if (code == error::bad_method) return "The method of the request line is not a token.";
  if (code == error::bad_target)
    return "The target of the request line is empty or has a space "
           "or a control character.";
  if (code == error::bad_field) return "The name of a header field is not a token.";
  if (code == error::bad_value) return "The value of a header field is malformed.";
  if (code == error::bad_content_length) {
    return "Content-Length is not one number, or it stands beside Transfer-Encoding.";
  }
  if (code == error::multiple_content_length) return "Content-Length is given twice.";
  if (code == error::bad_transfer_encoding) {
    return "Transfer-Encoding is given twice, or it stands beside Content-Length.";
  }
  if (code == error::bad_chunk || code == error::bad_chunk_extension) {
    return "A chunk of the body is malformed.";
  }
  return "The request is not HTTP.";
}

}  // namespace

class RequestReader::Parser final : public http::basic_parser<true> {
 public:
  explicit Parser(const ReaderLimits& reader_limits) : limits(reader_limits) {
    header_limit(std::numeric_limits<uint32_t>::max());  // ScanHead and Put apply ours
    body_limit(std::numeric_limits<uint64_t>::max());
  }

  void Fail(int with_status, std::string sentence) {
    if (state == State::kFailed) return;  // the first reason is the one
    state = State::kFailed;
    status = with_status;
    message = std::move(sentence);
  }

  // The bytes of the head in `bytes`, 0 while it has not ended. Goes on where it stopped last.
  size_t ScanHead(std::string_view bytes) {
    const size_t end = std::min(bytes.size(), limits.max_header_bytes);
    for (; scanned < end; ++scanned) {
      const auto c = static_cast<uint8_t>(bytes[scanned]);
      const bool after_cr = scanned > 0 && bytes[scanned - 1] == '\r';
      if (after_cr != (c == '\n')) {
        Fail(400, "A line of the head does not end with CR LF.");
        return 0;
      }
      if (c == '\n') {
        if (scanned == line_start + 1) return scanned + 1;
        line_start = scanned + 1;
        ++lines;
      } else if ((c < 0x20 && c != '\r' && c != '\t') || c == 0x7f) {
        Fail(400, "The head has a control character.");
        return 0;
      } else if (scanned == line_start && (c == ' ' || c == '\t')) {
        Fail(400, "A line of the head begins with a space.");
        return 0;
      }
    }
    if (bytes.size() >= limits.max_header_bytes) {
      if (lines == 0) {
        Fail(414, "The request line is longer than " + std::to_string(limits.max_header_bytes) +
                      " bytes.");
      } else {
        Fail(431, "The header fields are longer than " + std::to_string(limits.max_header_bytes) +
                      " bytes.");
      }
    }
    return 0;
  }

  size_t PutHead(std::string_view bytes) {
    size_t skipped = 0;
    if (!past_first_line && bytes.substr(0, 2) == "\r\n") skipped = 2;  // RFC 9112, 2.2
    if (bytes.size() == 1 && bytes[0] == '\r') return 0;
    past_first_line = past_first_line || skipped > 0 || !bytes.empty();
    if (skipped > 0) return skipped;
    const size_t head = ScanHead(bytes);
    if (head == 0) return 0;
    error_code error;
    const size_t used = put(boost::asio::const_buffer(bytes.data(), head), error);
    if (state == State::kFailed) return used;
    if (error == http::error::bad_version) {
      // Only a line that is whole but for its version, "PRI * HTTP/2.0", asks for another version.
      const std::string_view line = bytes.substr(0, bytes.find('\r'));
      const size_t last = line.rfind(' ');
      const bool other = std::count(line.begin(), line.end(), ' ') == 2 &&
                         line.size() == last + 9 && line.substr(last, 6) == " HTTP/" &&
                         line[last + 7] == '.';
      Fail(other ? 505 : 400, "The version is neither HTTP/1.0 nor HTTP/1.1.");
    } else if (error || !is_header_done() || used != head) {
      Fail(400, ParserMessage(error));
    } else {
      state = State::kHeadDone;
    }
    return used;
  }

  size_t PutBody(std::string_view bytes) {
    size_t used = 0;
    while (!is_done()) {
      error_code error;
      const size_t before = request.body.size();
      const size_t step =
          put(boost::asio::const_buffer(bytes.data() + used, bytes.size() - used), error);
      used += step;
      if (state == State::kFailed) return used;
      if (error == http::error::need_more) break;
      if (error) {
        Fail(400, ParserMessage(error));
        return used;
      }
      if (chunked() && request.body.size() == before && step > limits.max_header_bytes) {
        FailChunkLine();  // a step without bytes of the body
        return used;
      }
      if (used == bytes.size() && !is_done()) break;
    }
    if (is_done()) {
      state = State::kDone;
    } else if (bytes.size() - used > limits.max_header_bytes) {
      FailChunkLine();
    }
    return used;
  }

  void FailChunkLine() {
    Fail(400, "The line of a chunk or the trailers are longer than " +
                  std::to_string(limits.max_header_bytes) + " bytes.");
  }

  void on_request_impl(http::verb, BeastView method, BeastView target, int version,
                       error_code& error) override {
    request.method = std::string(View(method));
    http10 = version == 10;
    std::string why;
    if (!ParseTarget(View(target), &request, &why)) {
      Fail(400, std::move(why));
      error = http::error::bad_target;
    }
  }

  void on_response_impl(int, BeastView, int, error_code&) override {}

  void on_field_impl(http::field field, BeastView name, BeastView value,
                     error_code& error) override {
    if (head_done) return;  // a trailer: nothing that was decided by the head may change
    if (field == http::field::host) ++hosts;
    if (field == http::field::content_length && value.find(',') != BeastView::npos) {
      Fail(400, "Content-Length is not one number.");
      error = http::error::bad_content_length;
      return;
    }
    if (field == http::field::transfer_encoding && Lower(View(value)) != "chunked") {
      Fail(501, "Transfer-Encoding is not 'chunked', the only one that is understood.");
      error = http::error::bad_transfer_encoding;
      return;
    }
    const auto [entry, is_new] = request.headers.emplace(Lower(View(name)), View(value));
    if (is_new) return;
    // A repeated Content-Length that Beast let pass is the same number: one is enough.
    if (field == http::field::content_length) return;
    if (field == http::field::authorization) {
      Fail(400, "Authorization is given twice.");
      error = http::error::bad_value;
      return;
    }
    entry->second += ", ";
    entry->second += View(value);
  }

  void on_header_impl(error_code& error) override {
    head_done = true;
    if (http10 && chunked()) {
      Fail(400, "Transfer-Encoding is not part of HTTP/1.0.");
      error = http::error::bad_transfer_encoding;
    } else if (hosts > 1 || (hosts == 0 && !http10)) {
      Fail(400, hosts > 1 ? "Host is given twice." : "Host is missing.");
      error = http::error::bad_field;
    }
  }

  void on_body_init_impl(const boost::optional<uint64_t>&, error_code&) override {}

  size_t on_body_impl(BeastView body, error_code& error) override { return Append(body, error); }

  void on_chunk_header_impl(uint64_t size, BeastView extension, error_code& error) override {
    for (const char c : View(extension)) {
      if ((static_cast<uint8_t>(c) < 0x20 && c != '\t') || c == 0x7f) {
        Fail(400, "The line of a chunk has a control character.");
        error = http::error::bad_chunk_extension;
        return;
      }
    }
    if (size > limits.max_body_bytes - request.body.size()) TooLarge(error);
  }

  size_t on_chunk_body_impl(uint64_t, BeastView body, error_code& error) override {
    return Append(body, error);
  }

  void on_finish_impl(error_code&) override {}

  size_t Append(BeastView body, error_code& error) {
    if (body.size() > limits.max_body_bytes - request.body.size()) {
      TooLarge(error);
      return 0;
    }
    request.body.append(body.data(), body.size());
    return body.size();
  }

  void TooLarge(error_code& error) {
    Fail(413, "The body is larger than " + std::to_string(limits.max_body_bytes) + " bytes.");
    error = http::error::body_limit;
  }

  const ReaderLimits limits;
  State state = State::kHead;
  int status = 0;
  std::string message;
  HttpRequest request;
  bool http10 = false;
  bool head_done = false;
  bool past_first_line = false;  // an empty line before the request line is over
  int hosts = 0;
  size_t scanned = 0;     // bytes of the head that ScanHead has seen
  size_t line_start = 0;  // of the line that it is in
  size_t lines = 0;       // that have ended
};

RequestReader::RequestReader(const ReaderLimits& limits)
    : parser_(std::make_unique<Parser>(limits)) {}

RequestReader::~RequestReader() = default;

size_t RequestReader::Put(std::string_view bytes) {
  OKV_CHECK(state() != State::kDone && state() != State::kFailed);
  if (state() == State::kHead) {
    size_t used = parser_->PutHead(bytes);
    if (state() == State::kHead && used > 0) used += parser_->PutHead(bytes.substr(used));
    return used;
  }
  if (state() == State::kHeadDone) {
    if (!has_body()) {
      parser_->state = State::kDone;
      return 0;
    }
    parser_->state = State::kBody;
  }
  return parser_->PutBody(bytes);
}

RequestReader::State RequestReader::state() const {
  return parser_->state;
}
int RequestReader::status() const {
  return parser_->status;
}
const std::string& RequestReader::message() const {
  return parser_->message;
}
HttpRequest& RequestReader::request() {
  return parser_->request;
}
bool RequestReader::http10() const {
  return parser_->http10;
}
bool RequestReader::keep_alive() const {
  return parser_->keep_alive();
}
bool RequestReader::has_body() const {
  return parser_->chunked() || content_length().value_or(0) > 0;
}
std::optional<uint64_t> RequestReader::content_length() const {
  const auto length = parser_->content_length();
  if (!length) return std::nullopt;
  return *length;
}

}  // namespace omnikv::server
