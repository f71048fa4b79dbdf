// What a person at a terminal meets: line editing, commands and history of chat, Ctrl-C and Ctrl-D.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <string>

#include "program.h"
#include "terminal.h"

namespace omnikv::cli::terminal_test {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kPrompt = "The pass key is 48213. Remember it. What is the pass key?";
// With "Tell me a story.": thousands of tokens, in which Ctrl-C finds it.
const std::string kEndless = "-n 100000 --temp 100 --seed 1";
const std::string kEnter = "\r";
const std::string kUp = "\033[A";
const std::string kLeft = "\033[D";
const std::string kCtrlC = "\x03";
const std::string kCtrlD = "\x04";

class AtTerminal : public ProgramTest {
 protected:
  std::string Chat(const std::string& flags = "-n 12") const {
    return std::string(OMNIKV_BINARY) + " chat --device cpu --threads 2 " + flags;
  }
  // The history of a test is its own.
  std::vector<std::string> Environment() const {
    return {"OMNIKV_HISTORY=" + (dir_ / "history").string()};
  }
};

TEST_F(AtTerminal, LinesAreEditedAndAnswered) {
  Terminal t(Chat(), Environment());
  ASSERT_TRUE(t.SeePrompt()) << t.shown();
  // The cursor goes back over two letters, a wrong one goes, the right one comes.
  std::string typed = kPrompt;
  typed.replace(typed.find("48213"), 5, "48x13");
  const size_t back = typed.size() - typed.find('x') - 1;
  t.Type(typed);
  for (size_t i = 0; i < back; ++i) t.Type(kLeft);
  t.Type(
      "\x7f"
      "2" +
      kEnter);
  ASSERT_TRUE(t.See("48213.\r\n")) << t.shown();
  ASSERT_TRUE(t.See("tokens read at")) << t.shown();
  ASSERT_TRUE(t.SeePrompt()) << t.shown();
  t.Type(kCtrlD);
  EXPECT_EQ(t.End(), 0);
  EXPECT_THAT(t.shown(), EndsWith("\r\n"));  // a fresh line for the shell
}

TEST_F(AtTerminal, TheHistoryIsPrivateAndOutlivesTheProgram) {
  {
    Terminal t(Chat(), Environment());
    ASSERT_TRUE(t.SeePrompt());
    t.Type(kPrompt + kEnter);
    ASSERT_TRUE(t.See("tokens read at")) << t.shown();
    ASSERT_TRUE(t.SeePrompt());
    t.Type("/bye" + kEnter);
    EXPECT_EQ(t.End(), 0);
  }
  struct stat info {};
  ASSERT_EQ(stat((dir_ / "history").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  Terminal t(Chat(), Environment());
  ASSERT_TRUE(t.SeePrompt());
  t.Type(kUp + kUp + kEnter);  // before /bye
  ASSERT_TRUE(t.See("48213.\r\n")) << t.shown();
  ASSERT_TRUE(t.SeePrompt());
  t.Type("/exit" + kEnter);
  EXPECT_EQ(t.End(), 0);
}

TEST_F(AtTerminal, TheHistoryHasAPlaceAndCanBeOff) {
  const std::string state = dir_ / "state";
  {
    Terminal t(Chat(), {"OMNIKV_HISTORY=", "XDG_STATE_HOME=" + state});
    ASSERT_TRUE(t.SeePrompt());
    t.Type("/bye" + kEnter);
    EXPECT_EQ(t.End(), 0);
    EXPECT_FALSE(fs::exists(state));
  }
  Terminal t("env -u OMNIKV_HISTORY " + Chat(), {"XDG_STATE_HOME=" + state});
  ASSERT_TRUE(t.SeePrompt());
  t.Type("/bye" + kEnter);
  EXPECT_EQ(t.End(), 0);
  EXPECT_THAT(Slurp(fs::path(state) / "omnikv" / "history"), HasSubstr("/bye\n"));
  struct stat info {};
  ASSERT_EQ(stat((fs::path(state) / "omnikv").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST_F(AtTerminal, CommandsAreNotTurns) {
  Terminal t(Chat("-n 4"), Environment());
  ASSERT_TRUE(t.See("/help lists the commands")) << t.shown();
  ASSERT_TRUE(t.SeePrompt());
  t.Type("/help" + kEnter);
  ASSERT_TRUE(t.See("/clear  forget the conversation")) << t.shown();
  ASSERT_TRUE(t.SeePrompt());
  t.Type("/frob" + kEnter);
  ASSERT_TRUE(t.See("omnikv: there is no command /frob; /help lists them, //frob is a text"));
  ASSERT_TRUE(t.SeePrompt());
  EXPECT_THAT(t.shown(), Not(HasSubstr("tokens read at")));
  t.Type("Hello there." + kEnter);
  ASSERT_TRUE(t.See(" in context)")) << t.shown();
  const auto tokens_read = [&] {
    const size_t line = t.shown().rfind(" tokens read at");
    return std::stoi(t.shown().substr(t.shown().rfind('(', line) + 1));
  };
  const int first = tokens_read();
  ASSERT_TRUE(t.SeePrompt());
  t.Type("/clear" + kEnter);
  ASSERT_TRUE(t.SeePrompt());
  t.Type("/help is no command here: " + kEnter);  // but it is: a name has no spaces
  ASSERT_TRUE(t.See("there is no command")) << t.shown();
  ASSERT_TRUE(t.SeePrompt());
  t.Type("//Hello there." + kEnter);
  ASSERT_TRUE(t.See(" in context)")) << t.shown();
  // After /clear nothing is left but what the two begin with; with the first turn it would be more.
  EXPECT_LE(tokens_read(), first + 2) << t.shown();
  ASSERT_TRUE(t.SeePrompt());
  t.Type(kCtrlD);
  EXPECT_EQ(t.End(), 0);
}

TEST_F(AtTerminal, TextsMayHaveSeveralLines) {
  Terminal t(Chat(), Environment());
  ASSERT_TRUE(t.SeePrompt());
  t.Type("\"\"\"The pass key is 48213." + kEnter);
  ASSERT_TRUE(t.See(". ")) << t.shown();
  t.Type("/bye" + kEnter);
  t.Type("Remember it." + kEnter + "What is the pass key?\"\"\"" + kEnter);
  ASSERT_TRUE(t.See(" 48213.\r\n")) << t.shown();
  ASSERT_TRUE(t.SeePrompt());
  // A terminal marks what is pasted.
  EXPECT_THAT(t.shown(), HasSubstr("\033[?2004h"));
  t.Type("/clear" + kEnter);
  ASSERT_TRUE(t.SeePrompt());
  t.Type("\033[200~The pass key is 51677.\rRemember it.\nWhat is the pass key?\033[201~");
  t.Type(kEnter);
  ASSERT_TRUE(t.See(" 51677.\r\n")) << t.shown();
  ASSERT_TRUE(t.See(" 51677.\r\n")) << t.shown();  // the text, then the answer
  ASSERT_TRUE(t.SeePrompt());
  t.Type("/bye" + kEnter);
  EXPECT_EQ(t.End(), 0);
}

TEST_F(AtTerminal, Utf8IsTypedWhateverTheLocale) {
  auto environment = Environment();
  environment.push_back("LC_ALL=C");
  Terminal t(Chat("-n 4"), environment);
  ASSERT_TRUE(t.SeePrompt());
  t.Type("Grüße, 世界" + kEnter);
  ASSERT_TRUE(t.See("Grüße, 世界")) << t.shown();
  ASSERT_TRUE(t.See(" in context)")) << t.shown();
  ASSERT_TRUE(t.SeePrompt());
  t.Type(kUp + kEnter);
  ASSERT_TRUE(t.See("Grüße, 世界")) << t.shown();
  t.Type("/bye" + kEnter);
  EXPECT_EQ(t.End(), 0);
}

TEST_F(AtTerminal, CtrlCGivesAFreshPrompt) {
  Terminal t(Chat("-n 4"), Environment());
  ASSERT_TRUE(t.SeePrompt());
  t.Type("Not this");
  ASSERT_TRUE(t.See("Not this"));
  t.Type(kCtrlC);
  ASSERT_TRUE(t.See("^C")) << t.shown();
  ASSERT_TRUE(t.SeePrompt()) << t.shown();
  t.Type("\"\"\"nor this" + kEnter);
  ASSERT_TRUE(t.See(". "));
  t.Type(kCtrlC);
  ASSERT_TRUE(t.SeePrompt()) << t.shown();
  EXPECT_THAT(t.shown(), Not(HasSubstr("tokens read at")));
  t.Type("/bye" + kEnter);
  EXPECT_EQ(t.End(), 0);
  EXPECT_THAT(Slurp(dir_ / "history"), Not(HasSubstr("this")));
}

TEST_F(AtTerminal, CtrlCEndsAnAnswerNotTheConversation) {
  Terminal t(Chat(kEndless), Environment());
  ASSERT_TRUE(t.SeePrompt());
  t.Type("Tell me a story." + kEnter);
  ASSERT_TRUE(t.See("story.\r\n"));
  ASSERT_TRUE(t.See(" ")) << t.shown();  // of the answer
  t.Type(kCtrlC);
  // In its prompt already, or in the answer.
  ASSERT_TRUE(t.See("omnikv: ")) << t.shown();
  ASSERT_TRUE(t.SeePrompt());
  t.Type("/bye" + kEnter);
  EXPECT_EQ(t.End(), 0);
}

// A Ctrl-C that comes as an answer ends finds no answer left.
TEST_F(AtTerminal, AnInterruptBetweenAnswersIsOutlived) {
  Terminal t(Chat("-n 4"), Environment());
  ASSERT_TRUE(t.SeePrompt());
  for (int i = 0; i < 3; ++i) t.Signal(SIGINT);
  t.Type("Hello." + kEnter);
  ASSERT_TRUE(t.See(" in context)")) << t.shown();
  ASSERT_TRUE(t.SeePrompt()) << t.shown();
  t.Type("/bye" + kEnter);
  EXPECT_EQ(t.End(), 0);
}

TEST_F(AtTerminal, CtrlZStopsAndTheLineGoesOn) {
  Terminal t("sh -c 'set -m; " + Chat("-n 4") + "; stty -a; fg'", Environment());
  ASSERT_TRUE(t.SeePrompt());
  t.Type("Hel");
  ASSERT_TRUE(t.See("Hel"));
  t.Type("\x1a");
  ASSERT_TRUE(t.See(" icanon")) << t.shown();  // the shell has the terminal as it was
  ASSERT_TRUE(t.See("Hel")) << t.shown();      // the line again
  EXPECT_TRUE(t.Raw());
  t.Type("lo." + kEnter);
  ASSERT_TRUE(t.See(" in context)")) << t.shown();
  t.Type("/bye" + kEnter);
  EXPECT_EQ(t.End(), 0);
  EXPECT_THAT(Slurp(dir_ / "history"), HasSubstr("Hello."));
}

TEST_F(AtTerminal, SignalsGiveTheTerminalBack) {
  for (const int signal : {SIGTERM, SIGHUP, SIGQUIT}) {
    Terminal t("sh -c 'ulimit -c 0; exec " + Chat() + "'", Environment());
    ASSERT_TRUE(t.SeePrompt());
    t.Signal(signal);
    EXPECT_EQ(t.End(), 128 + signal);
    EXPECT_FALSE(t.Raw());
    EXPECT_THAT(t.shown(), EndsWith("\033[?2004l"));
  }
  Terminal dumb(Chat(), {"OMNIKV_HISTORY=", "TERM=dumb"});
  ASSERT_TRUE(dumb.SeePrompt());
  dumb.Signal(SIGTERM);
  EXPECT_EQ(dumb.End(), 128 + SIGTERM);
  EXPECT_THAT(dumb.shown(), Not(HasSubstr("\033")));
}

TEST_F(AtTerminal, NoEscapesWithoutATerminalThatKnowsThem) {
  for (const std::string term : {"dumb", ""}) {
    auto environment = Environment();
    environment.push_back("TERM=" + term);
    Terminal run(std::string(OMNIKV_BINARY) + " run -n 2 -p Hello --device cpu", environment);
    EXPECT_EQ(run.End(), 0);
    EXPECT_THAT(run.shown(), Not(HasSubstr("\033"))) << term;
    Terminal chat(Chat("-n 2"), environment);
    ASSERT_TRUE(chat.SeePrompt());
    chat.Type("Hello." + kEnter);
    ASSERT_TRUE(chat.See(" in context)")) << chat.shown();
    chat.Type("/bye" + kEnter);
    EXPECT_EQ(chat.End(), 0);
    EXPECT_THAT(chat.shown(), Not(HasSubstr("\033"))) << term;
  }
  // One that does has bars.
  Terminal run(std::string(OMNIKV_BINARY) + " run -n 2 -p Hello --device cpu", Environment());
  EXPECT_EQ(run.End(), 0);
  EXPECT_THAT(run.shown(), HasSubstr("\033[K"));
  Terminal quiet(std::string(OMNIKV_BINARY) + " run -q -n 2 -p Hello --device cpu", Environment());
  EXPECT_EQ(quiet.End(), 0);
  EXPECT_THAT(quiet.shown(), Not(HasSubstr("\033")));
}

TEST_F(AtTerminal, ATextFromStdinNeedsOneCtrlD) {
  Terminal t(std::string(OMNIKV_BINARY) + " run -n 12 -f - --device cpu");
  ASSERT_TRUE(t.See("Ctrl-D")) << t.shown();  // it says that it waits
  t.Type(kPrompt + "\n");
  ASSERT_TRUE(t.See("key?\r\n"));
  t.Type(kCtrlD);
  ASSERT_TRUE(t.See("48213")) << t.shown();
  EXPECT_EQ(t.End(), 0);
}

TEST_F(AtTerminal, CtrlCEndsRunWith130) {
  const std::string run = std::string(OMNIKV_BINARY) + " run --device cpu --threads 2 ";
  Terminal answering(run + kEndless + " -p 'Tell me a story.'");
  ASSERT_TRUE(answering.See("reading")) << answering.shown();
  ASSERT_TRUE(answering.See("\r\033[K")) << answering.shown();  // the bar is gone
  ASSERT_TRUE(answering.See(" ")) << answering.shown();         // the answer goes on
  answering.Type(kCtrlC);
  EXPECT_EQ(answering.End(), 130);
  EXPECT_THAT(answering.shown(), HasSubstr("omnikv: the answer was cut by Ctrl-C after "));
  EXPECT_THAT(answering.shown(), EndsWith(" tokens\r\n"));

  // A prompt stops after the chunk that it is at.
  std::string text;
  for (int i = 0; i < 12000; ++i) text += "The grass is green. ";
  Spill(dir_ / "long.txt", text);
  Terminal reading(run + "--raw --chunk 64 --policy full --ctx 128k -f " +
                   (dir_ / "long.txt").string());
  ASSERT_TRUE(reading.See("reading")) << reading.shown();
  reading.Type(kCtrlC);
  EXPECT_EQ(reading.End(), 130);
  EXPECT_THAT(reading.shown(), HasSubstr("omnikv: cancelled after "));
}

// The turns after it are left.
TEST_F(AtTerminal, CtrlCEndsAChatThatReadsAPipe) {
  Terminal t("sh -c 'trap : INT; printf \"Tell me a story.\\nAnother.\\n\" | " + Chat(kEndless) +
             "; echo rc $?'");
  ASSERT_TRUE(t.See("reading")) << t.shown();
  ASSERT_TRUE(t.See("\r\033[K")) << t.shown();
  ASSERT_TRUE(t.See(" ")) << t.shown();
  t.Type(kCtrlC);
  EXPECT_TRUE(t.See("omnikv: the answer was cut by Ctrl-C after ")) << t.shown();
  EXPECT_TRUE(t.See("rc 130")) << t.shown();
}

// A shell has what a script starts in the background ignore Ctrl-C.
TEST_F(AtTerminal, IgnoredInterruptsStayIgnored) {
  const Outcome o =
      Run("run -n 400 --raw -p 'Once upon a time' --json --device cpu & p=$!; "
          "for i in 1 2 3 4 5 6 7 8; do sleep 0.3; kill -INT $p; done; wait $p");
  EXPECT_EQ(o.exit_code, 0) << o.err;
  EXPECT_THAT(o.out, HasSubstr("\"finish_reason\":\"length\"")) << o.err;
}

}  // namespace
}  // namespace omnikv::cli::terminal_test
