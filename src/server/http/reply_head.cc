#include "server/http/reply_head.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>

namespace omnikv::server {
namespace {

constexpr std::pair<int, const char*> kPhrases[] = {
    {100, "Continue"},
    {200, "OK"},
    {201, "Created"},
    {202, "Accepted"},
    {204, "No Content"},
    {301, "Moved Permanently"},
    {302, "Found"},
    {304, "Not Modified"},
    {307, "Temporary Redirect"},
    {308, "Permanent Redirect"},
    {400, "Bad Request"},
    {401, "Unauthorized"},
    {403, "Forbidden"},
    {404, "Not Found"},
    {405, "Method Not Allowed"},
    {408, "Request Timeout"},
    {409, "Conflict"},
    {413, "Content Too Large"},
    {414, "URI Too Long"},
    {415, "Unsupported Media Type"},
    {417, "Expectation Failed"},
    {422, "Unprocessable Content"},
    {429, "Too Many Requests"},
    {431, "Request Header Fields Too Large"},
    {500, "Internal Server Error"},
    {501, "Not Implemented"},
    {503, "Service Unavailable"},
    {504, "Gateway Timeout"},
    {505, "HTTP Version Not Supported"},
};

const char* Phrase(int status) {
  for (const auto& [known, phrase] : kPhrases) {
    if (known == status) return phrase;
  }
  return "Other";
}

std::string Lower(std::string text) {
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
  }
  return text;
}

bool IsName(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<uint8_t>(c) > 0x20 && static_cast<uint8_t>(c) < 0x7f &&
           std::string_view("\"(),/:;<=>?@[\\]{}").find(c) == std::string_view::npos;
  });
}

bool FramesBody(const std::string& name) {
  const std::string lower = Lower(name);
  return lower == "content-length" || lower == "transfer-encoding" || lower == "connection" ||
         lower == "trailer" || lower == "upgrade";
}

void AddLine(const std::string& name, const std::string& value, std::string* text) {
  if (!IsName(name)) return;
  *text += name;
  *text += ": ";
  for (const char c : value) {
    const auto byte = static_cast<uint8_t>(c);
    text->push_back(byte < 0x20 || byte == 0x7f ? ' ' : c);
  }
  *text += "\r\n";
}

}  // namespace

bool HasBody(int status) {
  return status >= 200 && status != 204 && status != 304;
}

bool IsEventStream(const std::string& content_type) {
  constexpr std::string_view kType = "text/event-stream";
  const std::string lower = Lower(content_type);
  return lower.compare(0, kType.size(), kType) == 0 &&
         (lower.size() == kType.size() || lower[kType.size()] == ';' || lower[kType.size()] == ' ');
}

std::string FormatHead(const HttpHead& head, const ReplyFacts& facts) {
  std::string text = "HTTP/1.1 " + std::to_string(head.status) + " " + Phrase(head.status) + "\r\n";
  if (HasBody(head.status)) {
    if (!head.content_type.empty()) AddLine("Content-Type", head.content_type, &text);
    if (facts.length) {
      AddLine("Content-Length", std::to_string(*facts.length), &text);
    } else if (!facts.http10) {
      AddLine("Transfer-Encoding", "chunked", &text);
    }
    if (IsEventStream(head.content_type)) {
      AddLine("Cache-Control", "no-cache", &text);
      AddLine("X-Accel-Buffering", "no", &text);  // nginx passes events on as they come
    }
  }
  if (!facts.keep_alive) {
    AddLine("Connection", "close", &text);
  } else if (facts.http10) {
    AddLine("Connection", "keep-alive", &text);
  }
  for (const auto& [name, value] : facts.more) AddLine(name, value, &text);
  for (const auto& [name, value] : head.headers) {
    if (!FramesBody(name)) AddLine(name, value, &text);
  }
  text += "\r\n";
  return text;
}

}  // namespace omnikv::server
