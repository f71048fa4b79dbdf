#include "option_names.h"

#include <algorithm>
#include <array>
#include <utility>

namespace omnikv::tools {

std::string WithFlags(std::string_view message) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 36> kFlags = {{
      {"api_keys", "--api-key-file"},
      {"certificate_file", "--ssl-cert-file"},
      {"context", "--ctx"},
      {"device", "--device"},
      {"disk_space", "--disk-space"},
      {"frequency_penalty", "--frequency-penalty"},
      {"geometry", "--geometry"},
      {"gpu_memory", "--gpu-memory"},
      {"host_memory", "--host-memory"},
      {"host_reads", "--host-reads"},
      {"kept_contexts", "--kept-contexts"},
      {"key_file", "--ssl-key-file"},
      {"kv_dtype", "--kv-dtype"},
      {"kv_folder", "--kv-folder"},
      {"kv_tokens", "--kv-tokens"},
      {"listen", "--listen"},
      {"logit_bias", "--logit-bias"},
      {"max_tokens", "-n"},
      {"max_waiting", "--max-waiting"},
      {"min_p", "--min-p"},
      {"place", "--place"},
      {"policy", "--policy"},
      {"precision", "--precision"},
      {"prefix", "--api-prefix"},
      {"prefill_chunk", "--chunk"},
      {"presence_penalty", "--presence-penalty"},
      {"repeat_penalty", "--repeat-penalty"},
      {"seats", "--seats"},
      {"stop", "--stop"},
      {"store", "--store"},
      {"temperature", "--temp"},
      {"threads", "--threads"},
      {"token_ms", "--token-ms"},
      {"top_k", "--top-k"},
      {"top_p", "--top-p"},
      {"working_set", "--working-set"},
  }};
  std::string out;
  while (true) {
    const size_t begin = message.find('`');
    const size_t end = begin == std::string_view::npos ? begin : message.find('`', begin + 1);
    if (end == std::string_view::npos) return out.append(message);
    const std::string_view field = message.substr(begin + 1, end - begin - 1);
    const auto flag = std::find_if(kFlags.begin(), kFlags.end(),
                                   [&](const auto& pair) { return pair.first == field; });
    if (flag != kFlags.end()) {
      out.append(message.substr(0, begin)).append(flag->second);
      message.remove_prefix(end + 1);
    } else {  // its end may be another's begin
      out.append(message.substr(0, end));
      message.remove_prefix(end);
    }
  }
}

}  // namespace omnikv::tools
