// Which ops use K/V where they are. A card reaches no memory that lies on a disk: rows come from
// there by FetchRowsArgs and by copies alone.
#pragma once

#include <variant>

#include "backend/ops.h"

namespace omnikv {

// Whether `op` reads or writes K/V in a memory for whose addresses holds(p) is true, other than by
// FetchRowsArgs. What a CustomArgs uses is not known here. Of rows that go to slots, the slots
// count.
template <typename Holds>
bool UsesInPlace(const Op& op, const Holds& holds) {
  const auto in = [&](const KvView& kv) {
    return (kv.k.base != nullptr && holds(kv.k.base)) || (kv.v.base != nullptr && holds(kv.v.base));
  };
  return std::visit(
      [&](const auto& args) {
        bool any = false;
        if constexpr (requires { args.slot.row; }) {
          any = args.slot.k != nullptr ? holds(args.slot.k) || holds(args.slot.v) : in(args.kv);
        } else if constexpr (requires { args.kv.k; }) {
          any = in(args.kv);
        }
        if constexpr (requires { args.from.k; }) any = any || in(args.from);
        if constexpr (requires { args.rest.k; }) any = any || in(args.rest);
        return any;
      },
      op);
}

}  // namespace omnikv
