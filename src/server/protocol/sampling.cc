#include "server/protocol/sampling.h"

#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <utility>

#include "base/printable.h"
#include "server/protocol/model_name.h"

namespace omnikv::server {
namespace {

void ReadSeed(FieldReader* body, Question* question) {
  const Json* seed = body->Find("seed");
  if (seed == nullptr) return;
  if (seed->is_number_unsigned()) {
    question->generate.sampling.seed = seed->get<uint64_t>();
  } else if (seed->is_number_integer()) {
    const auto given = seed->get<int64_t>();
    if (given == -1) return;
    question->generate.sampling.seed = static_cast<uint64_t>(given);
  } else {
    return body->Fail("seed", "a whole number");
  }
  question->seeded = true;
}

void ReadBias(FieldReader* body, SamplingOptions* sampling) {
  const Json* bias = body->Object("logit_bias");
  if (bias == nullptr) return;
  for (const auto& [key, value] : bias->items()) {
    const std::string field = fmt::format("logit_bias.{}", Escaped(key, kPrintableBytes));
    int32_t token = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    if (error != std::errc() || end != key.data() + key.size() || token < 0) {
      return body->Check(Wrong(field, value, "the number of a token as the key"));
    }
    const double number = value.is_number() ? value.get<double>() : 1000;
    if (!(number >= -100 && number <= 100)) {
      return body->Check(Wrong(field, value, "a number from -100 to 100"));
    }
    sampling->logit_bias.emplace_back(token, static_cast<float>(number));
  }
}

void ReadPenalty(FieldReader* body, SamplingOptions* sampling) {
  body->Number("repeat_penalty", 0.01, 100, &sampling->repeat_penalty);
  body->Number("repetition_penalty", 0.01, 100, &sampling->repeat_penalty);
}

void ReadReads(FieldReader* object, Question* question) {
  const Json* value = object->Find("return_reads");
  if (value == nullptr) return;
  if (value->is_boolean()) {
    question->read_bins = value->get<bool>() ? kReadBins : 0;
    return;
  }
  object->Int("return_reads", 1, kMaxReadBins, &question->read_bins,
              fmt::format("true, false or a whole number from 1 to {}", kMaxReadBins));
}

void ReadPolicy(FieldReader* body, Question* question) {
  std::string model;
  if (body->String("model", &model)) {
    auto parsed = ParseModelName(model);
    if (!parsed.ok()) return body->Check(parsed.status());
    question->model = std::move(parsed->name);
    question->policy = std::move(parsed->policy);
    question->settings = std::move(parsed->settings);
  }
  const Json* object = body->Object("omnikv");
  if (object == nullptr) return;
  FieldReader fields(*object, body->PathOf("omnikv."));
  std::string policy;
  // settings in the name of the model belong to the policy there
  if (fields.String("policy", &policy) && policy != question->policy) {
    question->policy = policy;
    question->settings.clear();
  }
  ReadReads(&fields, question);
  body->Check(fields.status());
  for (const auto& [key, value] : object->items()) {
    if (key == "policy" || key == "return_reads" || value.is_null()) continue;
    if (value.is_structured()) {
      return body->Check(Wrong(body->PathOf("omnikv." + Escaped(key, kPrintableBytes)), value,
                               "a number, a text, true or false"));
    }
    std::string text = value.is_string() ? value.get_ref<const std::string&>() : Dump(value);
    bool known = false;
    for (auto& setting : question->settings) {
      if (setting.first != key) continue;
      setting.second = text;
      known = true;
    }
    if (!known) question->settings.emplace_back(key, std::move(text));
  }
}

// llama-server's json_schema and vLLM's structured_outputs.
void ReadSchemas(FieldReader* body, Question* question) {
  const Json* schema = body->Object("json_schema");
  if (const Json* outputs = body->Object("structured_outputs"); outputs != nullptr) {
    FieldReader fields(*outputs, body->PathOf("structured_outputs."));
    schema = fields.Object("json");
    for (const char* other : {"regex", "choice", "grammar", "structural_tag"}) {
      fields.Refuse(other, "answers follow a JSON schema or nothing");
    }
    body->Check(fields.status());
  }
  if (schema == nullptr || !body->ok()) return;
  question->format.kind = AnswerFormat::Kind::kJsonSchema;
  question->format.schema = *schema;
}

}  // namespace

void ReadCommon(FieldReader* body, Question* question) {
  SamplingOptions& sampling = question->generate.sampling;
  sampling.temperature = 1;
  ReadPolicy(body, question);
  body->Number("temperature", 0, 100, &sampling.temperature);
  body->Number("top_p", 0, 1, &sampling.top_p);
  body->Number("min_p", 0, 1, &sampling.min_p);
  if (body->Int("top_k", -1, 1'000'000'000, &sampling.top_k) && sampling.top_k < 0) {
    sampling.top_k = 0;
  }
  ReadPenalty(body, &sampling);
  body->Number("presence_penalty", -2, 2, &sampling.presence_penalty);
  body->Number("frequency_penalty", -2, 2, &sampling.frequency_penalty);
  ReadBias(body, &sampling);
  ReadSeed(body, question);
  body->Bool("ignore_eos", &question->generate.ignore_eos);
  body->Int("priority", std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(),
            &question->priority);
  body->Bool("stream", &question->stream);
  body->Bool("return_progress", &question->stream_progress);
  ReadReads(body, question);
  ReadSchemas(body, question);
  body->Refuse("min_tokens", "an answer may end at any token");
  body->Refuse("stop_token_ids", "stop takes texts, those of special tokens included");
  body->Refuse("grammar", "answers follow a JSON schema or nothing");
}

void ReadStop(FieldReader* body, std::string_view field, std::vector<std::string>* stop) {
  const Json* value = body->Find(field);
  if (value == nullptr) return;
  const std::string expected = fmt::format("a text or a list of at most {}", kMaxStops);
  const auto add = [&](const Json& text) {
    if (!text.get_ref<const std::string&>().empty()) stop->push_back(text);
  };
  if (value->is_string()) return add(*value);
  if (!value->is_array() || value->size() > kMaxStops) return body->Fail(field, expected);
  for (size_t i = 0; i < value->size(); ++i) {
    const Json& text = (*value)[i];
    if (!text.is_string()) {
      return body->Check(Wrong(fmt::format("{}[{}]", body->PathOf(field), i), text, "a text"));
    }
    add(text);
  }
}

void ReadMaxTokens(FieldReader* body, std::string_view field, Question* question) {
  int64_t tokens = 0;
  if (!body->Int(field, -1, std::numeric_limits<int64_t>::max(), &tokens,
                 "a whole number from 0, or -1 for no limit")) {
    return;
  }
  question->limited = tokens >= 0;
  if (question->limited) question->generate.max_tokens = tokens;
}

void ReadStreamOptions(FieldReader* body, Question* question) {
  const Json* object = body->Object("stream_options");
  if (object == nullptr) return;
  FieldReader options(*object, body->PathOf("stream_options."));
  options.Bool("include_usage", &question->stream_usage);
  body->Check(options.status());
}

void ReadChoices(FieldReader* body, Question* question) {
  body->Int("n", 1, kMaxChoices, &question->n);
  int32_t best_of = 0;
  if (body->Int("best_of", 1, kMaxChoices, &best_of) && best_of != question->n) {
    body->Fail("best_of", fmt::format("n, which is {}", question->n));
  }
}

}  // namespace omnikv::server
