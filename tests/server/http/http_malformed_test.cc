// What is not HTTP, or what two readers could take for different requests, is refused, and the
// connection ends: nothing behind it is taken for a request.
#include <gtest/gtest.h>

#include "http_client.h"
#include "server/http/request_reader.h"

namespace omnikv::server::http_malformed_test {
namespace {

struct Malformed {
  const char* name;
  std::string text;
  int status;
};

const std::string kNul(1, '\0');

std::vector<Malformed> Cases() {
  const std::string post = "POST / HTTP/1.1\r\nHost: x\r\n";
  const std::string get = "GET / HTTP/1.1\r\nHost: x\r\n";
  const std::string chunked = post + "Transfer-Encoding: chunked\r\n\r\n";
  return {
      {"CL then TE", post + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
       400},
      {"TE then CL", post + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
       400},
      {"two CL", post + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345", 400},
      {"CL list", post + "Content-Length: 5, 5\r\n\r\n12345", 400},
      {"CL sign", post + "Content-Length: +5\r\n\r\n12345", 400},
      {"CL minus", post + "Content-Length: -5\r\n\r\n12345", 400},
      {"CL hex", post + "Content-Length: 0x5\r\n\r\n12345", 400},
      {"CL empty", post + "Content-Length:\r\n\r\n", 400},
      {"CL huge", post + "Content-Length: 99999999999999999999999\r\n\r\n", 400},
      {"xchunked", post + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501},
      {"gzip, chunked", post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501},
      {"chunked, identity", post + "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 501},
      {"chunked twice", post + "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 501},
      {"two TE", chunked.substr(0, chunked.size() - 2) + "Transfer-Encoding: chunked\r\n\r\n", 400},
      {"TE with VT",
       post + "Transfer-Encoding: \x0b"
              "chunked\r\n\r\n0\r\n\r\n",
       400},
      {"TE quoted", post + "Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n", 501},
      {"TE in 1.0", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"obs-fold", get + "A: b\r\n c\r\n\r\n", 400},
      {"obs-fold tab", get + "A: b\r\n\tc\r\n\r\n", 400},
      {"fold first", "GET / HTTP/1.1\r\n Host: x\r\n\r\n", 400},
      {"bare CR", get + "A: b\rContent-Length: 5\r\n\r\n", 400},
      {"bare LF", get + "A: b\nContent-Length: 5\r\n\r\n", 400},
      {"LF only", "GET / HTTP/1.1\nHost: x\n\n", 400},
      {"CR CR LF", get + "A: b\r\r\n\r\n", 400},
      {"space before colon", get + "Content-Length : 5\r\n\r\n", 400},
      {"tab before colon", get + "A\t: 5\r\n\r\n", 400},
      {"no colon", get + "A\r\n\r\n", 400},
      {"empty name", get + ": 5\r\n\r\n", 400},
      {"name with umlaut", get + "\xc3\xa4: 5\r\n\r\n", 400},
      {"NUL in value", get + "A: b" + kNul + "\r\n\r\n", 400},
      {"NUL in name", get + "A" + kNul + ": b\r\n\r\n", 400},
      {"NUL in target", "GET /" + kNul + " HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"control in value", get + "A: \x01\r\n\r\n", 400},
      {"DEL in value", get + "A: \x7f\r\n\r\n", 400},
      {"method", "G(T / HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"no method", " / HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"control in target", "GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"tab in line", "GET\t/ HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"space in target", "GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"two spaces", "GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"encoded NUL", "GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"encoded CR", "GET /%0d%0a HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"half escape", "GET /%4 HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"no escape", "GET /?a=%zz HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"fragment", "GET /#a HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"no slash", "GET a HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"authority", "CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"star", "GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"no version", "GET /\r\nHost: x\r\n\r\n", 400},
      {"version 2", "PRI * HTTP/2.0\r\n\r\n", 505},
      {"version 1.2", "GET / HTTP/1.2\r\nHost: x\r\n\r\n", 505},
      {"lower version", "GET / http/1.1\r\nHost: x\r\n\r\n", 400},
      {"trailing space", "GET / HTTP/1.1 \r\nHost: x\r\n\r\n", 400},
      {"no host", "GET / HTTP/1.1\r\n\r\n", 400},
      {"two hosts", "GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400},
      {"two keys", get + "Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400},
      {"TLS", "\x16\x03\x01\x02", 400},
      {"chunk size", chunked + "g\r\n", 400},
      {"chunk size sign", chunked + "+1\r\na\r\n0\r\n\r\n", 400},
      {"chunk size 0x", chunked + "0x1\r\na\r\n0\r\n\r\n", 400},
      {"chunk size space", chunked + " 1\r\na\r\n0\r\n\r\n", 400},
      {"chunk size huge", chunked + "fffffffffffffffff\r\n", 400},
      {"chunk LF", chunked + "1\na\r\n0\r\n\r\n", 400},
      {"chunk CR", chunked + "1\ra\r\n0\r\n\r\n", 400},
      {"chunk too long", chunked + "1\r\nab\r\n0\r\n\r\n", 400},
      {"extension", chunked + "1;\"\r\na\r\n0\r\n\r\n", 400},
      {"extension LF", chunked + "1;a=\"\n\"\r\na\r\n0\r\n\r\n", 400},
      {"trailer CL", chunked + "0\r\nContent-Length: 5\r\n\r\n", 400},
      {"trailer TE", chunked + "0\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
  };
}

TEST(HttpMalformed, IsRefusedAndEndsTheConnection) {
  std::atomic<int> handled = 0;
  const auto server = Serving({}, [&](const HttpRequest& request, auto reply) {
    ++handled;
    Echo(request, reply);
  });
  for (const Malformed& malformed : Cases()) {
    SCOPED_TRACE(malformed.name);
    Client client(server->addresses()[0]);
    client.Put(malformed.text + GetText("/smuggled"));
    const Answer answer = client.Next();
    EXPECT_EQ(answer.status, malformed.status) << answer.body;
    EXPECT_TRUE(answer.whole);
    EXPECT_EQ(answer.header("connection"), "close");
    EXPECT_NE(answer.body.find("{\"error\":{\"message\":\""), std::string::npos) << answer.body;
    EXPECT_EQ(answer.header("x-request-id").size(), 32u);
    EXPECT_TRUE(client.Ended()) << client.in();
  }
  EXPECT_EQ(handled, 0);
}

// However the bytes are torn, what comes of them is the same.
TEST(HttpMalformed, DoesNotDependOnHowBytesAreTorn) {
  auto cases = Cases();
  cases.push_back({"good", PostText("/a?b=c", "body", "A: b\r\n") + "more", 0});
  cases.push_back({"good chunks",
                   "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                   "5;a=\"b;c\"\r\nhello\r\n3\r\nabc\r\n0;x\r\nT: u\r\n\r\n",
                   0});
  cases.push_back({"empty line first", "\r\n" + GetText("/"), 0});
  for (const Malformed& malformed : cases) {
    SCOPED_TRACE(malformed.name);
    std::string first;
    for (const size_t step : {malformed.text.size(), size_t{1}, size_t{2}, size_t{7}}) {
      RequestReader reader({});
      std::string held;
      size_t given = 0;
      while (reader.state() != RequestReader::State::kDone &&
             reader.state() != RequestReader::State::kFailed) {
        const size_t used = reader.Put(held);
        held.erase(0, used);
        if (used > 0 || reader.state() == RequestReader::State::kDone) continue;
        if (given == malformed.text.size()) break;
        const size_t more = std::min(step, malformed.text.size() - given);
        held += malformed.text.substr(given, more);
        given += more;
      }
      std::string now = std::to_string(reader.status());
      if (reader.state() == RequestReader::State::kDone) now += Shown(reader.request());
      if (first.empty()) first = now;
      EXPECT_EQ(now, first) << "in steps of " << step;
      EXPECT_EQ(reader.status(), malformed.status);
      EXPECT_EQ(reader.state() == RequestReader::State::kDone, malformed.status == 0);
    }
  }
}

TEST(HttpMalformed, TrailersChangeNothing) {
  const auto server = Serving({});
  Client client(server->addresses()[0]);
  client.Put(
      "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
      "1\r\na\r\n0\r\nAuthorization: Bearer x\r\nHost: y\r\n\r\n");
  EXPECT_EQ(client.Next().body, "POST /\ntransfer-encoding: chunked\n\na");
  client.Put(PostText("/", "a", "Content-Length: 1\r\n"));  // the same number twice
  EXPECT_EQ(client.Next().body, "POST /\ncontent-length: 1\n\na");
}

}  // namespace
}  // namespace omnikv::server::http_malformed_test
