// PDFs as clients send them, and programs that do not do what they should.
#include "server/pdf_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>

namespace omnikv::server::pdf_text_test {
namespace {

using ::testing::HasSubstr;

// A PDF of one page that says `text`.
std::string TinyPdf(const std::string& text) {
  const std::string stream = "BT /F1 12 Tf 20 100 Td (" + text + ") Tj ET";
  const std::vector<std::string> objects = {
      "<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
      "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 400 200] /Contents 4 0 R "
      "/Resources << /Font << /F1 5 0 R >> >> >>",
      "<< /Length " + std::to_string(stream.size()) + " >>\nstream\n" + stream + "\nendstream",
      "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"};
  std::string pdf = "%PDF-1.4\n";
  std::string table = "0000000000 65535 f \n";
  for (size_t i = 0; i < objects.size(); ++i) {
    char entry[32];
    snprintf(entry, sizeof(entry), "%010zu 00000 n \n", pdf.size());
    table += entry;
    pdf += std::to_string(i + 1) + " 0 obj\n" + objects[i] + "\nendobj\n";
  }
  const size_t at = pdf.size();
  return pdf + "xref\n0 6\n" + table + "trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n" +
         std::to_string(at) + "\n%%EOF\n";
}

// A shell script in the place of pdftotext.
class Script {
 public:
  explicit Script(const std::string& body) {
    char name[] = "/tmp/omnikv_pdf_XXXXXX";
    close(mkstemp(name));
    path_ = name;
    std::ofstream(path_) << "#!/bin/sh\n" << body << "\n";
    chmod(path_.c_str(), 0700);
  }
  ~Script() { unlink(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string Refusal(std::string_view pdf, const PdfOptions& options) {
  const auto text = PdfText(pdf, options);
  EXPECT_FALSE(text.ok());
  return text.status().message();
}

class Pdftotext : public testing::Test {
 protected:
  void SetUp() override {
    if (!HasPdfText()) GTEST_SKIP() << "pdftotext is not installed (poppler-utils)";
  }
};

TEST_F(Pdftotext, ReadsATinyPdf) {
  const auto text = PdfText(TinyPdf("The pass key is 48213."));
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_THAT(*text, HasSubstr("The pass key is 48213."));
}

TEST_F(Pdftotext, RefusesWhatIsBrokenOrEmpty) {
  EXPECT_THAT(Refusal("%PDF-1.4\nnothing of a PDF", {}), HasSubstr("the PDF cannot be read"));
  const std::string whole = TinyPdf("x");
  EXPECT_FALSE(PdfText(whole.substr(0, 60)).ok());
  EXPECT_THAT(Refusal(TinyPdf(""), {}), HasSubstr("the PDF has no text"));
}

TEST_F(Pdftotext, RefusesMoreTextThanIsAllowed) {
  EXPECT_THAT(Refusal(TinyPdf("A text that is too long."), {.most_text = 8}),
              HasSubstr("more than 8 bytes of text"));
}

TEST(PdfText, SaysWhereTheProgramIsMissing) {
  const PdfOptions options{.program = "omnikv-no-such-program"};
  EXPECT_FALSE(HasPdfText(options));
  const auto text = PdfText(TinyPdf("x"), options);
  ASSERT_FALSE(text.ok());
  EXPECT_EQ(text.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(text.status().message(), HasSubstr("omnikv-no-such-program is not installed"));
}

TEST(PdfText, RefusesWhatIsNoPdf) {
  const Script script("echo it ran");
  EXPECT_THAT(Refusal("a text", {.program = script.path()}), HasSubstr("the body is no PDF"));
}

TEST(PdfText, HandsTheWholePdfOverAndTakesAllText) {
  const Script script("cat; cat >&2 /dev/null");
  std::string pdf = "%PDF-";
  pdf.append(3 << 20, 'x');
  const auto text = PdfText(pdf, {.program = script.path()});
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(*text, pdf);
}

TEST(PdfText, KillsWhatTakesTooLong) {
  for (const std::string body : {"sleep 60", "exec >&- 2>&-; sleep 60", "sleep 60 & sleep 60"}) {
    const Script script(body);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THAT(Refusal("%PDF-", {.program = script.path(), .seconds = 0.3}),
                HasSubstr("took longer than 0.3 s"))
        << body;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30)) << body;
  }
}

TEST(PdfText, KillsWhatTheProgramLeavesBehind) {
  const Script script("sleep 60 & echo text");
  const auto text = PdfText("%PDF-", {.program = script.path()});
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(*text, "text\n");
}

TEST(PdfText, KillsWhatWritesWithoutEnd) {
  const Script script("while :; do echo more and more; done");
  EXPECT_THAT(Refusal("%PDF-", {.program = script.path(), .most_text = 100'000}),
              HasSubstr("more than 100000 bytes of text"));
  // What it says besides is passed over.
  const Script loud(
      "i=0; while [ $i -lt 20000 ]; do echo says a lot >&2; i=$((i+1)); done; echo text");
  const auto text = PdfText("%PDF-", {.program = loud.path()});
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(*text, "text\n");
}

TEST(PdfText, PassesOnWhatTheProgramComplainedOf) {
  const Script script("echo 'Incorrect password' >&2; exit 1");
  EXPECT_EQ(Refusal("%PDF-", {.program = script.path()}),
            "the PDF cannot be read: 'Incorrect password'");
  const Script killed("kill -SEGV $$");
  EXPECT_EQ(Refusal("%PDF-", {.program = killed.path()}), "the PDF cannot be read");
}

TEST(PdfText, TheProgramHasNoneOfOurFiles) {
  const Script lists("ls /proc/self/fd | tr '\\n' ' '");
  const auto fds = PdfText("%PDF-", {.program = lists.path()});
  ASSERT_TRUE(fds.ok()) << fds.status().message();
  EXPECT_EQ(*fds, "0 1 2 3 ");  // 3 is the folder that ls reads
}

}  // namespace
}  // namespace omnikv::server::pdf_text_test
