// The target of a request line: its form, the percent-encoding and the query.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "server/http/request_reader.h"

namespace omnikv::server {
namespace {

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// False where % is not followed by two hexadecimal digits.
bool PercentDecode(std::string_view text, bool plus_is_space, std::string* decoded) {
  decoded->clear();
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+' && plus_is_space) {
      decoded->push_back(' ');
    } else if (text[i] != '%') {
      decoded->push_back(text[i]);
    } else {
      if (i + 2 >= text.size()) return false;
      const int high = HexValue(text[i + 1]);
      const int low = HexValue(text[i + 2]);
      if (high < 0 || low < 0) return false;
      decoded->push_back(static_cast<char>(high * 16 + low));
      i += 2;
    }
  }
  return true;
}

bool HasControls(std::string_view text) {
  for (const char c : text) {
    if (static_cast<uint8_t>(c) < 0x20 || c == 0x7f) return true;
  }
  return false;
}

bool EqualsIgnoringCase(std::string_view a, std::string_view lower) {
  if (a.size() != lower.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    const char c = a[i] >= 'A' && a[i] <= 'Z' ? static_cast<char>(a[i] + 32) : a[i];
    if (c != lower[i]) return false;
  }
  return true;
}

}  // namespace

bool ParseTarget(std::string_view target, HttpRequest* request, std::string* why) {
  if (target == "*" && request->method == "OPTIONS") {
    request->path.assign(1, '*');  // = "*" is a false warning of GCC 12
    return true;
  }
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!EqualsIgnoringCase(target.substr(0, scheme.size()), scheme)) continue;
    target.remove_prefix(scheme.size());
    const size_t slash = target.find_first_of("/?");
    target = slash == std::string_view::npos ? "/" : target.substr(slash);
    break;
  }
  if (target.empty() || (target[0] != '/' && target[0] != '?')) {
    *why = "The target of the request line does not begin with a slash.";
    return false;
  }
  if (target.find('#') != std::string_view::npos) {
    *why = "The target of the request line has a '#', which belongs to the client.";
    return false;
  }
  const size_t mark = target.find('?');
  if (!PercentDecode(target.substr(0, mark), false, &request->path)) {
    *why = "The path has a '%' without two hexadecimal digits after it.";
    return false;
  }
  if (HasControls(request->path)) {
    *why = "The path has a control character.";
    return false;
  }
  if (request->path.empty()) request->path.assign(1, '/');
  std::string_view query = mark == std::string_view::npos ? "" : target.substr(mark + 1);
  while (!query.empty()) {
    const size_t end = std::min(query.find('&'), query.size());
    const std::string_view pair = query.substr(0, end);
    query.remove_prefix(std::min(end + 1, query.size()));
    if (pair.empty()) continue;
    const size_t equals = std::min(pair.find('='), pair.size());
    std::string name, value;
    if (!PercentDecode(pair.substr(0, equals), true, &name) ||
        !PercentDecode(pair.substr(std::min(equals + 1, pair.size())), true, &value)) {
      *why = "The query has a '%' without two hexadecimal digits after it.";
      return false;
    }
    request->query[std::move(name)] = std::move(value);
  }
  return true;
}

}  // namespace omnikv::server
