// Standard streams that are closed, full or without end, and what a system refuses: the answer, or
// one sentence; never a signal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "program.h"

namespace omnikv::cli::streams_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::string kModel = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf";

class Streams : public ProgramTest {
 protected:
  // One sentence on stderr, nothing on stdout.
  void ExpectSentence(const Outcome& o, int exit_code, const std::string& part) {
    EXPECT_EQ(o.exit_code, exit_code) << o.err;
    EXPECT_EQ(o.out, "");
    EXPECT_THAT(o.err, StartsWith("omnikv: "));
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    EXPECT_THAT(o.err, HasSubstr(part));
  }
};

TEST_F(Streams, AStderrThatCannotBeWrittenChangesNothing) {
  const std::string run = "run -p hi -n 4";
  const std::string answer = Run(run).out;
  ASSERT_NE(answer, "");
  for (const char* lost : {" 2>/dev/full", " 2>&-", " 2</dev/null"}) {
    const Outcome o = Run(run + lost);
    EXPECT_EQ(o.exit_code, 0) << lost;
    EXPECT_EQ(o.out, answer) << lost;
    EXPECT_EQ(Run("chat -n 4" + std::string(lost), "hi\n").out, answer) << lost;
    EXPECT_EQ(Run("run -p x -m /nonexistent" + std::string(lost)).exit_code, 2) << lost;
    EXPECT_EQ(Run("logits --tokens 1 --out " + (dir_ / "x.npy").string() + lost).exit_code, 0);
    EXPECT_TRUE(fs::exists(dir_ / "x.npy"));
    fs::remove(dir_ / "x.npy");
  }
}

// Whoever read stderr has gone.
TEST_F(Streams, AStderrWithoutAReaderChangesNothing) {
  const Outcome o =
      Run("run -v -p hi -n 4 2>" + (dir_ / "fifo").string() + "; echo $?", "",
          "mkfifo " + (dir_ / "fifo").string() + "; (: <" + (dir_ / "fifo").string() + ") & ");
  EXPECT_EQ(o.out, Run("run -p hi -n 4").out + "0\n");
}

TEST_F(Streams, StreamsClosedAtTheStartAreNobodyElses) {
  const fs::path model = dir_ / "model.gguf";
  fs::copy_file(kModel, model);
  const std::string before = Slurp(model);
  for (const char* closed : {" >&-", " <&- >&- 2>&-", " >&- 2>&-"}) {
    for (const std::string& command :
         {"info -m " + model.string(), "run -n 2 -p hi -m " + model.string()}) {
      EXPECT_EQ(Run(command + closed).exit_code, 1) << command << closed;
    }
  }
  EXPECT_THAT(Run("info >&-").err, HasSubstr("omnikv: standard output cannot be written: "));
  EXPECT_EQ(Slurp(model), before);
  ExpectSentence(Run("run -f - <&-"), 2, "-f is '-', which cannot be read (");
}

TEST_F(Streams, AReaderOfStdoutThatGoesIsTold) {
  Spill(dir_ / "long", std::string(2000000, 'a'));
  const std::string fifo = (dir_ / "fifo").string();
  const Outcome o = Run("tokenize -f " + (dir_ / "long").string() + " >" + fifo, "",
                        "mkfifo " + fifo + "; (: <" + fifo + ") & ");
  ExpectSentence(o, 1, "standard output cannot be written: ");
}

TEST_F(Streams, AbsurdThreadsAreRefusedBeforeOneIsStarted) {
  for (const std::string& command :
       {std::string("info"), std::string("run -p x"), std::string("chat"),
        "logits --tokens 1 --out " + (dir_ / "x").string(), std::string("eval quickstart"),
        std::string("bench")}) {
    for (const char* n : {"1025", "60000", "2000000000", "-1"}) {
      ExpectSentence(Run(command + " --threads " + n), 2, std::string("--threads is ") + n);
    }
  }
  ExpectSentence(Run("bench --thread-counts 1,60000"), 2, "--thread-counts");
  ExpectSentence(Run("bench --thread-counts 0"), 2, "--thread-counts");
}

TEST_F(Streams, TheSystemsLastThreadIsNamed) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space";
#endif
  // The stacks of 700 threads do not fit into this address space.
  ExpectSentence(Run("info --threads 700", "", "ulimit -v 700000; "), 1,
                 "700 threads are asked for, but the system starts only ");
}

TEST_F(Streams, IdsAreReadWithoutATree) {
  const fs::path nest = dir_ / "nest.json";
  Spill(nest, std::string(80000, '[') + std::string(80000, ']'));
  const std::string small_stack =
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
      "";
#else
      "ulimit -s 128; ";
#endif
  ExpectSentence(Run("tokenize --decode -f " + nest.string(), "", small_stack), 2,
                 "an array is no id, expected a JSON array of ids from 0 to 8191");
  for (const auto& [text, part] : std::vector<std::pair<const char*, const char*>>{
           {"[1, {}]", "an object is no id"},
           {"[1, \"2\"]", "a string is no id"},
           {"[1.0]", "a number that is fractional"},
           {"[99999999999999999999]", "beyond 64 bits"},
           {"[18446744073709551615]", "9223372036854775807 is no id"},
           {"[-1]", "-1 is no id"},
           {"[8192]", "8192 is no id"},
           {"[1, 2", "not JSON from byte"},
           {"[1] [2]", "not JSON from byte"},
           {"[1e999]", "not JSON from byte"},
           {"7", "no JSON array"},
           {"{}", "no JSON array"},
           {"", "no JSON array"}}) {
    if (*text == '\0') continue;  // an empty -p is refused as such
    ExpectSentence(Run(std::string("tokenize --decode -p '") + text + "'"), 2, part);
  }
  EXPECT_EQ(Run("tokenize --decode -p '[]'").out, "\n");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // 20 million ids that are one token each: text and ids take 120 MB, a tree would take 1.5 GB.
  Spill(nest, "[1" + std::string(20000000, ' ') + "]");
  EXPECT_EQ(Run("tokenize --decode -f " + nest.string(), "", "ulimit -v 300000; ").exit_code, 0);
#endif
}

TEST_F(Streams, DecodedTextEndsItsLine) {
  const Outcome ids = Run("tokenize --raw -p 'The grass is green.'");
  const Outcome text = Run("tokenize --decode -f -", ids.out);
  EXPECT_THAT(text.out, testing::EndsWith("The grass is green.\n"));
}

TEST_F(Streams, TextsWithoutEndEnd) {
  for (const std::string command : {"tokenize", "run"}) {
    ExpectSentence(Run(command + " -f /dev/zero"), 2,
                   "-f is '/dev/zero', which holds more than 256.00 MiB");
    const std::string fifo = (dir_ / "fifo").string();
    ExpectSentence(Run(command + " -f " + fifo, "",
                       "rm -f " + fifo + "; mkfifo " + fifo + "; yes >" + fifo + " & "),
                   2, "which holds more than 256.00 MiB");
  }
  ExpectSentence(Run("run -f - </dev/zero"), 2, "-f is '-', which holds more than 256.00 MiB");
  ExpectSentence(Run("tokenize -f /nonexistent"), 2, "(No such file or directory)");
}

}  // namespace
}  // namespace omnikv::cli::streams_test
