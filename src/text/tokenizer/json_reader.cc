#include "text/tokenizer/json_reader.h"

#include <fmt/format.h>

#include <utility>

#include "base/json.h"

namespace omnikv::tok {
namespace {

using nlohmann::json;

// Of the document without its tables: room for 250,000 added tokens.
constexpr JsonLimits kLimits = {.max_depth = 64, .max_values = 2'000'000};

// The events of nlohmann's parser. A method that returns false ends the parse; error() says why.
class Handler {
 public:
  using number_integer_t = json::number_integer_t;
  using number_unsigned_t = json::number_unsigned_t;
  using number_float_t = json::number_float_t;
  using string_t = json::string_t;
  using binary_t = json::binary_t;

  explicit Handler(TokenizerJson* out) : out_(out) {}

  const std::string& error() const { return error_.empty() ? tree_.error() : error_; }
  json TakeDocument() && { return std::move(tree_).Take(); }

  bool null() { return table_ != Table::kNone ? WrongItem("null") : tree_.Add(json()); }
  bool boolean(bool v) {
    return table_ != Table::kNone ? WrongItem("a boolean") : tree_.Add(json(v));
  }
  bool number_integer(number_integer_t v) { return Number(v, static_cast<double>(v), json(v)); }
  bool number_unsigned(number_unsigned_t v) {
    return Number(v > INT64_MAX ? -1 : static_cast<int64_t>(v), static_cast<double>(v), json(v));
  }
  bool number_float(number_float_t v, const string_t&) { return Number(-1, v, json(v)); }
  bool string(string_t& v) {
    return table_ != Table::kNone ? TableString(v) : tree_.Add(json(std::move(v)));
  }
  bool binary(binary_t&) { return false; }

  bool start_object(size_t) {
    if (table_ == Table::kNone && AtModelKey("vocab")) {
      BeginTable(Table::kMap);
      return true;
    }
    if (table_ != Table::kNone) return WrongItem("an object");
    return tree_.Open(json::object());
  }
  bool key(string_t& v) {
    if (table_ == Table::kMap) {
      text_ = Keep(v);
      return true;
    }
    tree_.Key(std::move(v));
    return true;
  }
  bool end_object() { return Close(); }

  bool start_array(size_t) {
    if (table_ == Table::kNone) {
      if (AtModelKey("vocab")) {
        BeginTable(Table::kList);
        return true;
      }
      if (AtModelKey("merges")) {
        BeginTable(Table::kMerges);
        return true;
      }
      return tree_.Open(json::array());
    }
    if (table_ == Table::kMap || in_item_) return WrongItem("an array");
    in_item_ = true;
    items_ = 0;
    return true;
  }
  bool end_array() {
    if (table_ == Table::kNone || !in_item_) return Close();
    in_item_ = false;
    if (items_ != 2) return WrongItem(fmt::format("an array of {}", items_));
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception&) {
    error_ = fmt::format("is not valid JSON at byte {}", position);
    return false;
  }

 private:
  enum class Table { kNone, kMap, kList, kMerges };

  bool AtModelKey(std::string_view key) const {
    return tree_.depth() == 2 && tree_.key(0) == "model" && tree_.key(1) == key;
  }

  void BeginTable(Table table) {
    table_ = table;
    if (table == Table::kMerges) {
      out_->merges.clear();
      out_->has_merges = true;
    } else {
      out_->vocab.clear();
      out_->has_vocab = true;
      out_->vocab_is_list = table == Table::kList;
    }
  }

  bool Close() {
    if (table_ == Table::kNone) {
      tree_.Close();
    } else {
      table_ = Table::kNone;
    }
    return true;
  }

  TokenizerJson::Text Keep(std::string_view text) {
    const TokenizerJson::Text kept = {static_cast<uint32_t>(out_->pool.size()),
                                      static_cast<uint32_t>(text.size())};
    out_->pool += text;
    return kept;
  }

  bool WrongItem(std::string_view found) {
    switch (table_) {
      case Table::kMap:
        error_ = fmt::format("has {} in model.vocab, expected ids from 0", found);
        break;
      case Table::kList:
        error_ = fmt::format("has {} in model.vocab, expected [\"token\", score] pairs", found);
        break;
      default:
        error_ = fmt::format(
            "has {} in model.merges, expected \"left right\" or [\"left\", \"right\"]", found);
    }
    return false;
  }

  bool Number(int64_t id, double value, json as_json) {
    switch (table_) {
      case Table::kNone:
        return tree_.Add(std::move(as_json));
      case Table::kMap:
        if (id < 0) return WrongItem(fmt::format("the number {}", value));
        out_->vocab.push_back({text_, id, 0});
        return true;
      case Table::kList:
        if (!in_item_ || items_ != 1) return WrongItem("a number");
        items_ = 2;
        out_->vocab.push_back({text_, static_cast<int64_t>(out_->vocab.size()), value});
        return true;
      case Table::kMerges:
        return WrongItem("a number");
    }
    return false;
  }

  bool TableString(std::string_view v) {
    if (table_ == Table::kList && in_item_ && items_ == 0) {
      items_ = 1;
      text_ = Keep(v);
      return true;
    }
    if (table_ != Table::kMerges) return WrongItem("a string");
    if (in_item_) {
      if (items_ == 0) text_ = Keep(v);
      if (items_ == 1) out_->merges.push_back({text_, Keep(v)});
      ++items_;
      return true;
    }
    const size_t space = v.find(' ');
    if (space == std::string_view::npos || v.find(' ', space + 1) != std::string_view::npos) {
      return WrongItem("a string without exactly one space");
    }
    const TokenizerJson::Text left = Keep(v.substr(0, space));
    out_->merges.push_back({left, Keep(v.substr(space + 1))});
    return true;
  }

  TokenizerJson* out_;
  JsonTree tree_{kLimits};      // the document
  Table table_ = Table::kNone;  // the table that is being read
  bool in_item_ = false;        // inside an array in a table
  int items_ = 0;               // read of that array
  TokenizerJson::Text text_{};  // the last text of a table
  std::string error_;
};

}  // namespace

Result<TokenizerJson> TokenizerJson::Parse(std::string_view text) {
  if (text.size() > (size_t{1} << 30)) {
    return Unsupported(fmt::format("has {} bytes, expected at most 1 GiB", text.size()));
  }
  TokenizerJson out;
  out.pool.reserve(text.size() / 2);
  Handler handler(&out);
  try {
    if (!json::sax_parse(text.data(), text.data() + text.size(), &handler)) {
      return Corrupt(handler.error());
    }
  } catch (const std::exception& e) {
    return Corrupt(fmt::format("is not valid JSON: {}", e.what()));
  }
  out.document = std::move(handler).TakeDocument();
  if (!out.document.is_object()) return Corrupt("is not a JSON object");
  return out;
}

}  // namespace omnikv::tok
