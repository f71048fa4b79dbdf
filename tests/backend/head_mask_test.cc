// Masks of KV heads, by the words of head_mask.h, and where views have KV heads.
#include "backend/head_mask.h"

#include <gtest/gtest.h>

#include <vector>

#include "backend/attn_plan.h"

namespace omnikv::head_mask_test {
namespace {

TEST(HeadMask, NamesHeadsInTheirOrder) {
  for (const std::vector<int32_t>& heads : std::vector<std::vector<int32_t>>{
           {0}, {5}, {63}, {0, 63}, {1, 2, 40}, {3, 31, 32, 33, 62}}) {
    const HeadMask mask = HeadMask::Of(heads);
    EXPECT_FALSE(mask.All());
    EXPECT_EQ(mask.Count(kMaxMaskedHeads), static_cast<int32_t>(heads.size()));
    int32_t before = 0;
    for (int32_t h = 0; h < kMaxMaskedHeads; ++h) {
      const bool named =
          before < static_cast<int32_t>(heads.size()) && heads[static_cast<size_t>(before)] == h;
      EXPECT_EQ(mask.Has(h), named) << h;
      EXPECT_EQ(mask.Before(h), before) << h;
      if (!named) continue;
      EXPECT_EQ(mask.Head(before), h);
      ++before;
    }
  }
}

TEST(HeadMask, WithoutABitAllHeadsOfAnyNumber) {
  const HeadMask all = HeadMask::Of({});
  EXPECT_TRUE(all.All());
  EXPECT_EQ(all.Count(200), 200);
  for (const int32_t h : {0, 63, 64, 199}) {
    EXPECT_TRUE(all.Has(h));
    EXPECT_EQ(all.Before(h), h);
    EXPECT_EQ(all.Head(h), h);
  }
}

// Place is a product with a rounded factor, and yet a division.
TEST(KvView, HeadsThatShareAPlaceLieInIt) {
  for (int32_t n = 1; n <= 300; ++n) {
    const KvView view = KvView{.n_kv_heads = 1000}.EachQueryHead(n);
    EXPECT_EQ(view.n_kv_heads, 1000 * n);
    EXPECT_EQ(view.HeadRepeats(), n);
    for (int32_t h = 0; h < view.n_kv_heads; h += 1 + h / 500) {
      ASSERT_EQ(view.Place(h), h / n) << n;
      ASSERT_EQ(view.Place(h / n * n), h / n) << n;
      ASSERT_EQ(view.Place(h / n * n + n - 1), h / n) << n;
    }
  }
}

}  // namespace
}  // namespace omnikv::head_mask_test
