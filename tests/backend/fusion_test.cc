// Which ops are launched together, from lists of ops alone.
#include "backend/fusion.h"

#include <gtest/gtest.h>

#include <array>

namespace omnikv::fusion_test {
namespace {

constexpr int32_t kRows = 3;
constexpr int32_t kWidth = 64;

// A step's arrays; only their addresses count.
struct Step {
  float x[1], y[1], o[1], ffn[1], norm[1];

  LinearArgs Projection(const float* from) {
    return {.x = from,
            .w = {.format = DType::kBF16, .n_out = kWidth, .n_in = 2 * kWidth},
            .y = y,
            .n_rows = kRows};
  }
  NormGatedFfnArgs Ffn() {
    return {.in = {.x = x, .y = y, .norm = norm, .scale = 0.5f, .d = kWidth},
            .gate = {.n_out = 2 * kWidth, .n_in = kWidth},
            .out = ffn,
            .n_rows = kRows};
  }
  AttendArgs Attention() {
    return {.o = o, .kv = {.n_kv_heads = 1, .dv = kWidth}, .n_rows = kRows, .n_heads = 2};
  }
  NormLogitsArgs Logits() {
    return {.in = {.x = x, .y = y, .norm = norm, .scale = 0.5f, .d = kWidth}, .n_rows = kRows};
  }
};

FusionRules Rules(bool bf16) {
  return {.leaves_bf16 = [=](const Op&) { return bf16; },
          .reads_bf16 = [](const LinearArgs& a) { return a.w.format != DType::kF32; }};
}

std::vector<FusedOp> FuseAll(const std::vector<Op>& ops, bool bf16 = true) {
  return Fuse(ops, Rules(bf16));
}

const float* PendingOf(FusedOp fused) {
  return ResidualOf(fused.op)->y;
}

TEST(Fusion, AProductAddsItselfToTheResidualOfTheNextOp) {
  Step s;
  const auto fused = FuseAll({s.Projection(s.o), s.Ffn(), s.Projection(s.ffn), s.Logits()}, false);
  ASSERT_EQ(fused.size(), 4u);
  for (const size_t i : {0, 2}) {
    EXPECT_EQ(fused[i].residual, s.x);
    EXPECT_EQ(fused[i].scale, 0.5f);
    EXPECT_EQ(PendingOf(fused[i + 1]), nullptr) << "added twice";
    EXPECT_EQ(fused[i + 1].residual, nullptr);
  }
}

TEST(Fusion, OnlyWhereTheNextOpAddsItAsItIs) {
  Step s;
  const auto alone = [&](const Op& next) {
    const auto fused = FuseAll({s.Projection(s.o), next});
    EXPECT_EQ(fused.size(), 2u);
    return fused[0].residual == nullptr && fused[1].op == next;
  };
  NormGatedFfnArgs next = s.Ffn();
  EXPECT_FALSE(alone(next));
  next.in.post_norm = s.norm;
  EXPECT_TRUE(alone(next)) << "what is added is normed first";
  next = s.Ffn();
  next.n_rows = kRows + 1;
  EXPECT_TRUE(alone(next)) << "other rows";
  next = s.Ffn();
  next.in.d = 2 * kWidth;
  EXPECT_TRUE(alone(next)) << "another width";
  next = s.Ffn();
  next.in.y = s.o;
  EXPECT_TRUE(alone(next)) << "another y";
  EXPECT_TRUE(alone(s.Attention())) << "no residual";
  EXPECT_TRUE(alone(s.Projection(s.ffn))) << "no residual";
}

TEST(Fusion, NothingFollowsTheLastOp) {
  Step s;
  const auto fused = FuseAll({s.Ffn(), s.Projection(s.o)});
  ASSERT_EQ(fused.size(), 2u);
  EXPECT_EQ(PendingOf(fused[0]), s.y) << "by a kernel of its own";
  EXPECT_EQ(fused[1].residual, nullptr);
  EXPECT_TRUE(FuseAll({}).empty());
}

TEST(Fusion, WhatAProjectionReadsIsLeftAsBf16) {
  Step s;
  const auto leaves = [&](const Op& op, const Op& next, bool bf16 = true) {
    const auto fused = FuseAll({op, next}, bf16);
    EXPECT_EQ(fused.size(), 2u);
    EXPECT_FALSE(fused[1].to_bf16);
    return fused[0].to_bf16;
  };
  EXPECT_TRUE(leaves(s.Attention(), s.Projection(s.o)));
  EXPECT_TRUE(leaves(s.Ffn(), s.Projection(s.ffn)));
  EXPECT_FALSE(leaves(s.Attention(), s.Projection(s.o), false)) << "its kernel cannot";
  EXPECT_FALSE(leaves(s.Attention(), s.Projection(s.ffn))) << "another x";
  LinearArgs other = s.Projection(s.o);
  other.w.format = DType::kF32;
  EXPECT_FALSE(leaves(s.Attention(), other)) << "a product in f32";
  other = s.Projection(s.o);
  other.n_rows = kRows - 1;
  EXPECT_FALSE(leaves(s.Attention(), other)) << "fewer rows than are written";
  other = s.Projection(s.o);
  other.w.n_in = kWidth;
  EXPECT_FALSE(leaves(s.Attention(), other)) << "rows of another width";
  AttendArgs some = s.Attention();
  some.kv.n_kv_heads = 2;
  some.heads = {2};
  EXPECT_FALSE(leaves(some, s.Projection(s.o))) << "some of the heads";
  // Between the two stands what might read it.
  const auto fused = FuseAll({s.Attention(), ScoreReduceArgs{}, s.Projection(s.o)});
  EXPECT_FALSE(fused[0].to_bf16);
}

// A layer of a prompt: both kinds in one list, in the order of the ops.
TEST(Fusion, ALayer) {
  Step s;
  const std::vector<Op> ops = {s.Attention(), s.Projection(s.o), s.Ffn(), s.Projection(s.ffn),
                               s.Logits()};
  const auto fused = FuseAll(ops);
  ASSERT_EQ(fused.size(), ops.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    EXPECT_EQ(fused[i].op.index(), ops[i].index());
    EXPECT_EQ(fused[i].to_bf16, i == 0 || i == 2) << i;
    EXPECT_EQ(fused[i].residual != nullptr, i == 1 || i == 3) << i;
  }
}

}  // namespace
}  // namespace omnikv::fusion_test
