// Splits what a model says, as it streams in, into reasoning, content and calls of tools.
//
// **Reasoning** is what stands between the tags at the beginning of the answer, or before the
// closing one where the prompt opened it. The tags are looked for whether or not the template has
// them. White space at its ends, and before the content that follows, is dropped.
// **Calls** come out whole: only then it is known that they are well-formed. What looks like the
// beginning of a call and is none comes out as content, byte for byte. White space before and after
// calls is dropped. With AnswerForm::stream_calls those whose arguments are an object that follows
// the name come out while they are written: their arguments are passed on as they are, well-formed
// or not, up to the } that ends them by the count of brackets.
// **Held back** is text that may be the beginning of a marker, white space that a marker may
// follow, and what follows a marker until the call ends. The result does not depend on how the text
// was cut.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/protocol/protocol.h"
#include "server/protocol/tool_calls.h"

namespace omnikv::server {

// How a model writes its answers.
struct AnswerForm {
  ToolFormat tools = ToolFormat::kHermes;
  std::string reasoning_open = "<think>";
  std::string reasoning_close = "</think>";
  bool in_reasoning = false;  // the prompt opened it
  bool stream_calls = false;  // arguments come out while they are written
};

// By what the template writes itself; in_reasoning is of a prompt: see EndsInReasoning.
AnswerForm DetectAnswerForm(std::string_view written);

// Whether a prompt, as it was rendered, ends with the tag that opens reasoning, white space aside.
bool EndsInReasoning(std::string_view prompt, const AnswerForm& form);

struct AnswerPart {
  enum class Kind { kReasoning, kContent, kCall, kArguments };
  Kind kind = Kind::kContent;
  // Of kCall: the arguments, JSON text of an object, or "" where they follow in parts of
  // kArguments, which are of the last call.
  std::string text;
  std::string id;    // of kCall
  std::string name;  // of kCall
};

// The parts of one choice. Movable, not copyable.
class AnswerParser {
 public:
  // Calls are looked for where the question has tools and its choice is not kNone; after the first
  // one the others are dropped where the question forbids parallel ones. The n-th call of choice c
  // has the id PREFIX + REPLY_ID + _c_n; kMistral's templates demand nine letters and digits, which
  // are made of it.
  AnswerParser(const AnswerForm& form, const Question& question, std::string id_prefix,
               std::string reply_id, int32_t choice);

  std::vector<AnswerPart> Add(std::string_view text);
  // What was held back. REQUIRES that nothing is added after it.
  std::vector<AnswerPart> End();

  int32_t calls() const { return calls_; }  // so far

 private:
  enum class State { kStart, kReasoning, kText };

  std::vector<AnswerPart> Run(bool final);
  // These return whether the text that is held may be looked at again, in a new state.
  bool Start(bool final);
  bool Reasoning(bool final, std::vector<AnswerPart>* out);
  bool Text(bool final, std::vector<AnswerPart>* out);
  bool Call(bool final, std::vector<AnswerPart>* out);
  bool OpenCall(bool final, std::vector<AnswerPart>* out);
  void EndCall(size_t size);
  bool DropSpace(bool final);
  // Emits the first `size` bytes that are held.
  void Emit(AnswerPart::Kind kind, size_t size, std::vector<AnswerPart>* out);
  void EmitCall(CallText call, std::vector<AnswerPart>* out);

  AnswerForm form_;
  std::shared_ptr<const Json> tools_;  // shared, so that readers may point at it when this moves
  std::vector<CallMarker> markers_;    // empty: no calls are looked for
  bool one_call_;
  std::string id_prefix_;
  std::string reply_id_;
  int32_t choice_;

  State state_ = State::kStart;
  std::string held_;
  bool at_start_ = true;     // of the reasoning or of the content: no byte of it came out yet
  bool drop_space_ = false;  // white space that is next goes
  bool after_call_ = false;  // nothing but white space came after the last call
  size_t open_at_ = 0;       // where in held_ the marker of reader_ begins
  size_t open_size_ = 0;     // and its size
  bool whole_ = false;       // reader_'s call must be read whole
  bool silent_ = false;      // or goes out, but is one too many
  CallReader::Head head_;    // of a call that goes out while it is written, where kGood
  size_t sent_ = 0;          // and how far it was passed on, from its marker
  std::unique_ptr<CallReader> reader_;  // of a call that has begun
  int32_t calls_ = 0;
};

}  // namespace omnikv::server
