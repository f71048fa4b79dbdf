// What tests of protocols share: bodies from text, and streams of events as JSON.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "server/protocol/fields.h"
#include "server/protocol/protocol.h"

namespace omnikv::server {

inline Json J(std::string_view text) {
  auto json = ParseBody(text);
  EXPECT_TRUE(json.ok()) << json.status().message() << " in " << text;
  return json.ok() ? std::move(*json) : Json();
}

// The data of each event; one that is no JSON ([DONE]) as a text. An event with a name must have
// that name as the `type` of its data.
inline Json Events(std::string_view bytes) {
  Json events = Json::array();
  while (!bytes.empty()) {
    const size_t end = bytes.find("\n\n");
    EXPECT_NE(end, std::string_view::npos) << "no end of event in " << bytes;
    if (end == std::string_view::npos) return events;
    std::string_view event = bytes.substr(0, end);
    bytes.remove_prefix(end + 2);
    std::string_view name;
    if (event.starts_with("event: ")) {
      const size_t line = event.find('\n');
      name = event.substr(7, line - 7);
      event.remove_prefix(line + 1);
    }
    EXPECT_TRUE(event.starts_with("data: ")) << event;
    EXPECT_EQ(event.find('\n'), std::string_view::npos) << event;
    const std::string_view data = event.substr(6);
    Json json = data;
    if (data != "[DONE]") json = J(data);
    if (!name.empty()) {
      EXPECT_EQ(json["type"], name);
    }
    events.push_back(std::move(json));
  }
  return events;
}

inline Reply TestReply() {
  return {.id = "77", .model = "m", .created = 5, .prompt_tokens = 9, .now_ms = [] { return 40; }};
}

inline Piece::Token Token(const std::string& text, double logprob,
                          std::vector<TokenLogprob> top = {}) {
  return {{text, logprob}, std::move(top)};
}

// Compares as text, so that the order of keys counts and a failure can be read.
inline std::string Pretty(const Json& json) {
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

template <typename Parse>
std::string Refusal(const Parse& parse, std::string_view body) {
  const auto question = parse(J(body));
  if (question.ok()) return "accepted";
  EXPECT_EQ(question.status().code(), StatusCode::kInvalidArgument);
  return question.status().message();
}

}  // namespace omnikv::server
