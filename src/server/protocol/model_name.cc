#include "server/protocol/model_name.h"

#include <fmt/format.h>

#include "base/printable.h"

namespace omnikv::server {
namespace {

Status Mistake(std::string_view text) {
  return InvalidArgument(fmt::format("`{}` is {}, expected NAME@POLICY:KEY=VALUE,KEY=VALUE",
                                     "model", Printable(text)));
}

}  // namespace

Result<ModelName> ParseModelName(std::string_view text) {
  ModelName model;
  const size_t at = text.rfind('@');
  if (at == std::string_view::npos) {
    model.name = text;
    return model;
  }
  model.name = text.substr(0, at);
  std::string_view rest = text.substr(at + 1);
  const size_t colon = rest.find(':');
  model.policy = rest.substr(0, colon);
  if (model.policy.empty()) return Mistake(text);
  if (colon == std::string_view::npos) return model;
  rest.remove_prefix(colon + 1);
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view setting = rest.substr(0, comma);
    const size_t equals = setting.find('=');
    if (equals == std::string_view::npos || equals == 0) return Mistake(text);
    model.settings.emplace_back(setting.substr(0, equals), setting.substr(equals + 1));
    if (comma == std::string_view::npos) return model;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace omnikv::server
