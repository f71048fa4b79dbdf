// The smallest program on the installed package: loads a model, reads a prompt, prints the answer.
//   hello_generate MODEL PROMPT
#include <omnikv/engine.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s MODEL PROMPT\n", argv[0]);
    return 2;
  }
  const auto fail = [](const omnikv::Status& status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return status.ExitCode();
  };
  omnikv::EngineOptions options;
  options.model = argv[1];
  auto engine = omnikv::Engine::Load(options);
  if (!engine.ok()) return fail(engine.status());

  auto session = (*engine)->NewSession({});
  if (!session.ok()) return fail(session.status());

  auto prompt = (*engine)->ChatPrompt({{"user", argv[2]}});
  if (!prompt.ok()) return fail(prompt.status());
  if (auto status = (*session)->Prompt(*prompt); !status.ok()) return fail(status);

  auto answer = (*session)->Generate({});
  if (!answer.ok()) return fail(answer.status());
  std::printf("%s\n", answer->text.c_str());
  return 0;
}
