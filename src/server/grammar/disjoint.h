// What can be said of plain schemas (schema.h) without a value.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace omnikv::server {

// Sets of types, a bit each. An integer is a number as well.
unsigned TypeBit(std::string_view type);
unsigned TypesOfValue(const nlohmann::ordered_json& value);

// Here and below, $ref names definition N as "#/$defs/rN".
using Definitions = std::vector<nlohmann::ordered_json>;

// Two of the schemas `options` that one value might fit; nothing where that is impossible.
std::optional<std::pair<size_t, size_t>> OverlapOf(const nlohmann::ordered_json& options,
                                                   const Definitions& definitions);

// Whether a definition is by $ref and anyOf alone one of its own options.
bool LeadsToItself(size_t definition, const Definitions& definitions);

// Which of the definitions some finite value fits, whichever optional parts it has.
std::vector<bool> WhichEnd(const Definitions& definitions);

}  // namespace omnikv::server
