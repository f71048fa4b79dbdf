// Fields of the library's messages as the program's flags.
#include "option_names.h"

#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <sstream>

namespace omnikv::tools::option_names_test {
namespace {

TEST(OptionNames, FieldsBecomeFlags) {
  EXPECT_EQ(WithFlags("`context` is 4: lower `prefill_chunk`"), "--ctx is 4: lower --chunk");
  EXPECT_EQ(WithFlags("no field"), "no field");
  EXPECT_EQ(WithFlags("'`x`context`' and a ` alone"), "'`x--ctx' and a ` alone");
  EXPECT_EQ(WithFlags("`"), "`");
  EXPECT_EQ(WithFlags(""), "");
}

}  // namespace
}  // namespace omnikv::tools::option_names_test
