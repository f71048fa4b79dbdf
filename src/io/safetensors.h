// Weights in Hugging Face's safetensors format: one file, or a folder of shards with an index.
//
// Format (https://huggingface.co/docs/safetensors): u64 length of the header, the header (a JSON
// object: tensor name -> {dtype, shape, data_offsets}, and "__metadata__": strings), then the data.
// It leaves no freedom: the tensors cover the data from its first byte to its last without hole or
// overlap, in any order. Files that differ are refused, as the reference implementation does. Two
// more things are refused here that it lets pass: a name that occurs twice, and unknown fields.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "io/tensor.h"
#include "omnikv/status.h"

namespace omnikv {

class SafetensorsModel final : public TensorSource {
 public:
  // `path` is a .safetensors file, or a folder that holds model.safetensors or, failing that,
  // model.safetensors.index.json and the shards it names. kNotFound when something is missing,
  // kCorrupt with the file, the tensor and the expectation when a file is not what it should be.
  static Result<std::unique_ptr<SafetensorsModel>> Open(const std::string& path);

  // The same for the bytes of one file in memory, which must outlive the model; `name` stands in
  // messages for the path.
  static Result<std::unique_ptr<SafetensorsModel>> FromMemory(std::string name,
                                                              const std::byte* data, size_t size);

 private:
  using TensorSource::TensorSource;

  // All append to `tensors`, in the order of the data.
  Status AddTensors(InputFile file, std::vector<TensorView>* tensors);
  Status AddFile(const std::string& file_path, std::vector<TensorView>* tensors);
  Status AddShards(const std::string& index_path, std::vector<TensorView>* tensors);
};

// The text of a model.safetensors.index.json: tensor name -> file name of its shard. A shard's name
// that could lead out of the model's folder is refused. `path` is for messages.
Result<std::map<std::string, std::string>> ParseSafetensorsIndex(const std::string& path,
                                                                 std::string_view text);

}  // namespace omnikv
