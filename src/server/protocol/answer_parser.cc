#include "server/protocol/answer_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace omnikv::server {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

size_t SpaceAtBegin(std::string_view text) {
  return std::min(text.find_first_not_of(kSpace), text.size());
}

// Bytes of `text` before the white space that ends it.
size_t WithoutSpaceAtEnd(std::string_view text) {
  const size_t last = text.find_last_not_of(kSpace);
  return last == std::string_view::npos ? 0 : last + 1;
}

// Bytes at the end of `text` that begin `marker` and are not all of it.
size_t Beginning(std::string_view text, std::string_view marker) {
  for (size_t size = std::min(text.size(), marker.size() - 1); size > 0; --size) {
    if (text.ends_with(marker.substr(0, size))) return size;
  }
  return 0;
}

// Nine letters and digits, by 64-bit FNV-1a.
std::string ShortId(std::string_view text) {
  constexpr char kLetters[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  std::string id;
  for (int i = 0; i < 9; ++i, hash /= 62) id += kLetters[hash % 62];
  return id;
}

}  // namespace

AnswerForm DetectAnswerForm(std::string_view written) {
  AnswerForm form;
  form.tools = DetectToolFormat(written);
  if (written.find("[THINK]") != std::string_view::npos) {
    form.reasoning_open = "[THINK]";
    form.reasoning_close = "[/THINK]";
  }
  return form;
}

bool EndsInReasoning(std::string_view prompt, const AnswerForm& form) {
  return prompt.substr(0, WithoutSpaceAtEnd(prompt)).ends_with(form.reasoning_open);
}

AnswerParser::AnswerParser(const AnswerForm& form, const Question& question, std::string id_prefix,
                           std::string reply_id, int32_t choice)
    : form_(form),
      tools_(std::make_shared<const Json>(question.tools)),
      one_call_(!question.parallel_tool_calls),
      id_prefix_(std::move(id_prefix)),
      reply_id_(std::move(reply_id)),
      choice_(choice) {
  if (tools_->is_array() && !tools_->empty() &&
      question.tool_choice.kind != ToolChoice::Kind::kNone) {
    markers_ = CallMarkers(form_.tools);
  }
  if (form_.in_reasoning) state_ = State::kReasoning;
}

std::vector<AnswerPart> AnswerParser::Add(std::string_view text) {
  held_ += text;
  return Run(false);
}

std::vector<AnswerPart> AnswerParser::End() {
  return Run(true);
}

std::vector<AnswerPart> AnswerParser::Run(bool final) {
  std::vector<AnswerPart> out;
  bool again = true;
  while (again) {
    switch (state_) {
      case State::kStart:
        again = Start(final);
        break;
      case State::kReasoning:
        again = Reasoning(final, &out);
        break;
      case State::kText:
        again = reader_ != nullptr ? Call(final, &out) : Text(final, &out);
        break;
    }
  }
  return out;
}

bool AnswerParser::Start(bool final) {
  const size_t space = SpaceAtBegin(held_);
  const std::string_view rest = std::string_view(held_).substr(space);
  if (rest.starts_with(form_.reasoning_open)) {
    held_.erase(0, space + form_.reasoning_open.size());
    state_ = State::kReasoning;
    return true;
  }
  if (!final && form_.reasoning_open.starts_with(rest)) return false;
  state_ = State::kText;
  return true;
}

bool AnswerParser::Reasoning(bool final, std::vector<AnswerPart>* out) {
  if (at_start_) {
    held_.erase(0, SpaceAtBegin(held_));
    if (!final && form_.reasoning_open.starts_with(held_)) return false;
    // some models open it again, though the prompt did
    if (form_.in_reasoning && held_.starts_with(form_.reasoning_open)) {
      held_.erase(0, form_.reasoning_open.size());
      form_.in_reasoning = false;
      return true;
    }
    at_start_ = false;
  }
  const size_t close = held_.find(form_.reasoning_close);
  if (close != std::string::npos) {
    const size_t size = WithoutSpaceAtEnd(std::string_view(held_).substr(0, close));
    Emit(AnswerPart::Kind::kReasoning, size, out);
    held_.erase(0, close - size + form_.reasoning_close.size());
    state_ = State::kText;
    at_start_ = true;
    drop_space_ = true;
    return true;
  }
  size_t size = held_.size();
  if (!final) {
    size -= Beginning(held_, form_.reasoning_close);
    size = WithoutSpaceAtEnd(std::string_view(held_).substr(0, size));
  }
  Emit(AnswerPart::Kind::kReasoning, size, out);
  return false;
}

// False: there is nothing but white space, and more may come.
bool AnswerParser::DropSpace(bool final) {
  size_t space = SpaceAtBegin(held_);
  // Llama's calls have ; between them
  if (after_call_ && form_.tools == ToolFormat::kLlama && space < held_.size() &&
      held_[space] == ';') {
    after_call_ = false;  // one of them
    ++space;
    space += SpaceAtBegin(std::string_view(held_).substr(space));
  }
  held_.erase(0, space);
  if (held_.empty() && !final) return false;
  drop_space_ = false;
  return true;
}

bool AnswerParser::Text(bool final, std::vector<AnswerPart>* out) {
  if (drop_space_ && !DropSpace(final)) return false;
  if (held_.empty()) return false;
  if (markers_.empty()) {
    Emit(AnswerPart::Kind::kContent, held_.size(), out);
    return false;
  }
  // the first marker in the text, and the longest beginning of one at its end
  const CallMarker* first = nullptr;
  size_t first_at = std::string::npos;
  size_t beginning = 0;
  for (const CallMarker& marker : markers_) {
    if (marker.open.empty()) {
      const size_t space = SpaceAtBegin(held_);
      if (!at_start_) continue;
      if (space < held_.size() && held_[space] == '{' && space < first_at) {
        first = &marker;
        first_at = space;
      }
      continue;
    }
    const size_t at = held_.find(marker.open);
    if (at < first_at) {
      first = &marker;
      first_at = at;
    }
    beginning = std::max(beginning, Beginning(held_, marker.open));
  }
  size_t size = held_.size();
  if (first != nullptr) {
    size = first_at;
  } else if (!final) {
    size -= beginning;
  }
  if (first != nullptr || !final) {
    size = WithoutSpaceAtEnd(std::string_view(held_).substr(0, size));
  }
  Emit(AnswerPart::Kind::kContent, size, out);
  if (first == nullptr) return false;
  open_at_ = first_at - size;
  open_size_ = std::max<size_t>(first->open.size(), 1);
  reader_ = std::make_unique<CallReader>(*first, *tools_);
  whole_ = false;
  return true;
}

bool AnswerParser::Call(bool final, std::vector<AnswerPart>* out) {
  if (head_.outcome == CallReader::Outcome::kGood) return OpenCall(final, out);
  const std::string_view text = std::string_view(held_).substr(open_at_);
  if (form_.stream_calls && !whole_) {
    head_ = reader_->ReadHead(text, final);
    if (head_.outcome == CallReader::Outcome::kMore) return false;
    whole_ = head_.outcome == CallReader::Outcome::kBad;
    if (!whole_) {
      sent_ = head_.arguments;
      silent_ = one_call_ && calls_ > 0;
      EmitCall({.name = head_.name}, out);
      return true;
    }
  }
  CallReader::Read read = reader_->Next(text, final);
  if (read.outcome == CallReader::Outcome::kMore) return false;
  if (read.outcome == CallReader::Outcome::kBad) {
    // the marker is content; another one may come after it
    reader_ = nullptr;
    Emit(AnswerPart::Kind::kContent, open_at_ + open_size_, out);
    return true;
  }
  EndCall(read.size);
  if (read.response) {
    held_.insert(0, *read.response);
    Emit(AnswerPart::Kind::kContent, read.response->size(), out);
    at_start_ = true;
  }
  for (CallText& call : read.calls) EmitCall(std::move(call), out);
  return true;
}

bool AnswerParser::OpenCall(bool final, std::vector<AnswerPart>* out) {
  const std::string_view text = std::string_view(held_).substr(open_at_);
  size_t end = 0;
  const bool ended = reader_->ArgumentsEnd(text, head_, &end);
  if (end > sent_ && !silent_) {
    const std::string_view fresh = text.substr(sent_, end - sent_);
    if (!out->empty() && out->back().kind == AnswerPart::Kind::kArguments) {
      out->back().text += fresh;
    } else {
      out->push_back({.kind = AnswerPart::Kind::kArguments, .text = std::string(fresh)});
    }
  }
  sent_ = end;
  if (!ended) {
    if (final) EndCall(text.size());
    return false;
  }
  const CallReader::Read read = reader_->Rest(text, head_, end, final);
  if (read.outcome == CallReader::Outcome::kMore) return false;
  EndCall(read.size);
  return true;
}

// Drops the first `size` bytes from the marker on, and what is before it, which is white space.
void AnswerParser::EndCall(size_t size) {
  held_.erase(0, open_at_ + size);
  reader_ = nullptr;
  head_ = {};
  drop_space_ = true;
  after_call_ = true;
  at_start_ = true;
}

void AnswerParser::Emit(AnswerPart::Kind kind, size_t size, std::vector<AnswerPart>* out) {
  if (size == 0) return;
  at_start_ = false;
  after_call_ = false;
  if (!out->empty() && out->back().kind == kind) {
    out->back().text.append(held_, 0, size);
  } else {
    out->push_back({.kind = kind, .text = held_.substr(0, size)});
  }
  held_.erase(0, size);
}

void AnswerParser::EmitCall(CallText call, std::vector<AnswerPart>* out) {
  if (one_call_ && calls_ > 0) return;
  std::string id = fmt::format("{}{}_{}_{}", id_prefix_, reply_id_, choice_, calls_++);
  if (form_.tools == ToolFormat::kMistral) id = ShortId(id);
  out->push_back({.kind = AnswerPart::Kind::kCall,
                  .text = std::move(call.arguments),
                  .id = std::move(id),
                  .name = std::move(call.name)});
}

}  // namespace omnikv::server
