#include "engine/given_text.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/batch.h"

namespace omnikv {
namespace {

Status CheckText(const EngineCore& core, const GivenText& text) {
  OKV_RETURN_IF_ERROR(CheckTokens(core, text.tokens));
  const auto n_tokens = static_cast<int64_t>(text.tokens.size());
  if (text.prompt_tokens >= 1 && text.prompt_tokens <= n_tokens) return {};
  return InvalidArgument(fmt::format("a prompt of {} tokens is asked for, expected 1 to all {}",
                                     text.prompt_tokens, n_tokens));
}

std::vector<int32_t> PromptOf(const GivenText& text) {
  return {text.tokens.begin(), text.tokens.begin() + text.prompt_tokens};
}

// Each on a session of its own: a session would keep rows that steps of the text before wrote.
Result<int64_t> OneAfterAnother(EngineCore& core, const PolicyOptions& policy,
                                std::span<const GivenText> texts, const GivenTextSink& sink) {
  int64_t steps = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    OKV_ASSIGN_OR_RETURN(const auto session, MakeSession(core, policy));
    int64_t position = texts[i].prompt_tokens - 1;
    OKV_RETURN_IF_ERROR(session->Prompt(PromptOf(texts[i])));
    OKV_RETURN_IF_ERROR(sink(i, position, session->logits()));
    while (++position < static_cast<int64_t>(texts[i].tokens.size())) {
      OKV_RETURN_IF_ERROR(session->Step(texts[i].tokens[static_cast<size_t>(position)]));
      OKV_RETURN_IF_ERROR(sink(i, position, session->logits()));
      ++steps;
    }
  }
  return steps;
}

Result<int64_t> Together(Batch& batch, std::span<const GivenText> texts,
                         const GivenTextSink& sink) {
  struct Running {
    size_t text;
    Batch::Next next;
  };
  std::vector<Running> running;
  std::vector<Batch::Next> step;
  size_t waiting = 0;  // the next text to join
  int64_t steps = 0;
  // Hands out a text's last logits, and names the token that comes next: -1 at the text's end,
  // where its number is free again.
  const auto hand_out = [&](Running& row) -> Status {
    const int64_t length = batch.length(row.next.member);
    OKV_RETURN_IF_ERROR(sink(row.text, length - 1, batch.logits(row.next.member)));
    const std::vector<int32_t>& tokens = texts[row.text].tokens;
    const bool ends = length == static_cast<int64_t>(tokens.size());
    if (ends) batch.Leave(row.next.member);
    row.next.token = ends ? -1 : tokens[static_cast<size_t>(length)];
    return {};
  };
  while (true) {
    while (waiting < texts.size() && running.size() < static_cast<size_t>(batch.max_seqs())) {
      Running row{.text = waiting, .next = {}};
      OKV_ASSIGN_OR_RETURN(row.next.member, batch.Join(PromptOf(texts[waiting++])));
      OKV_RETURN_IF_ERROR(hand_out(row));
      if (row.next.token >= 0) running.push_back(row);
    }
    if (running.empty()) return steps;
    step.clear();
    for (const Running& row : running) step.push_back(row.next);
    OKV_RETURN_IF_ERROR(batch.Step(step));
    ++steps;
    for (Running& row : running) OKV_RETURN_IF_ERROR(hand_out(row));
    std::erase_if(running, [](const Running& row) { return row.next.token < 0; });
  }
}

}  // namespace

Result<int64_t> DecodeGivenTexts(EngineCore& core, const PolicyOptions& policy,
                                 std::span<const GivenText> texts, const GivenTextSink& sink) {
  for (size_t i = 0; i < texts.size(); ++i) {
    OKV_RETURN_IF_ERROR(CheckText(core, texts[i]).Prefixed(fmt::format("text {}", i + 1)));
  }
  const int32_t most =
      std::min({core.options.max_sessions, kMaxBatch, core.work.max_rows, core.work.max_out / 2});
  const size_t n_seqs = std::min(texts.size(), static_cast<size_t>(most));
  if (n_seqs < 2) return OneAfterAnother(core, policy, texts, sink);
  const auto batch = Batch::Open(core, policy, static_cast<int32_t>(n_seqs));
  if (batch.status().code() == StatusCode::kUnsupported) {
    return OneAfterAnother(core, policy, texts, sink);
  }
  OKV_RETURN_IF_ERROR(batch.status());
  return Together(**batch, texts, sink);
}

}  // namespace omnikv
