#include "model/loader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/check.h"
#include "base/printable.h"
#include "io/file.h"
#include "io/gguf.h"
#include "io/safetensors.h"
#include "model/arch/arch.h"
#include "model/gguf_config.h"
#include "model/hf_config.h"
#include "model/limits.h"
#include "model/weight_plan.h"

namespace omnikv {

const Arch& ArchOf(std::string_view family) {
  for (const Arch* arch : AllArchs()) {
    if (arch->family == family) return *arch;
  }
  OKV_CHECK(false, "family {}", family);
}

const TensorPrefix& FindPrefix(const Arch& arch, const TensorSource& tensors) {
  for (const TensorPrefix& prefix : arch.hf_prefixes) {
    const std::string name = fmt::format("{}{}.weight", prefix.body, arch.hf_names.embed);
    if (tensors.Find(name) != nullptr) return prefix;
  }
  return arch.hf_prefixes.front();
}

void SetWindows(const std::vector<bool>& sliding, int32_t window, ModelConfig& config) {
  for (size_t i = 0; i < config.layers.size(); ++i) {
    if (sliding[i]) config.layers[i].window = window;
  }
}

std::vector<std::string> SupportedFamilies() {
  std::vector<std::string> names;
  for (const Arch* arch : AllArchs()) names.emplace_back(arch->family);
  std::sort(names.begin(), names.end());
  return names;
}

Status CheckConfig(const std::string& path, const ModelConfig& c) {
  if (c.n_heads % c.n_kv_heads != 0) {
    return Corrupt(fmt::format("{}: has {} attention heads, expected a multiple of its {} KV heads",
                               path, c.n_heads, c.n_kv_heads));
  }
  if (int64_t{c.n_heads} * c.head_dim > ModelLimits::kWidth) {
    return Corrupt(
        fmt::format("{}: has {} attention heads of {} values, expected at most {} values in all",
                    path, c.n_heads, c.head_dim, ModelLimits::kWidth));
  }
  return Status();
}

namespace {

// What follows from the fields, whatever the file's format.
void Derive(ModelConfig& config) {
  if (config.attn_scale == 0) {
    config.attn_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(config.head_dim)));
  }
  // Models made long by YaRN often keep the length that they had before.
  for (const RopeConfig& rope : config.ropes) {
    if (rope.scaling != RopeScaling::kYarn) continue;
    const double length = std::min(static_cast<double>(rope.original_context) * rope.factor,
                                   static_cast<double>(ModelLimits::kContext));
    config.max_context = std::max(config.max_context, static_cast<int64_t>(length));
  }
}

// What a folder that is no model holds instead and people take for it, as the end of a sentence.
std::string Instead(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(".gguf")) {
      return fmt::format(" (for {} in it, give that file's own path)", Printable(name));
    }
    if (name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth")) {
      return fmt::format(" ({} is not read: convert it to safetensors)", Printable(name));
    }
  }
  return "";
}

// Whether `path` is how people write a model of a web site, rather than a file: "https://...",
// "Qwen/Qwen2.5-0.5B".
bool LooksLikeName(const std::string& path) {
  if (path.find("://") != std::string::npos) return true;
  const size_t slash = path.find('/');
  return slash != std::string::npos && slash != 0 && path[0] != '.' && path[0] != '~' &&
         path.find('/', slash + 1) == std::string::npos && !path.ends_with(".gguf") &&
         !MayExist(path.substr(0, slash));
}

}  // namespace

Result<ModelKind> KindOfModel(const std::string& path) {
  namespace fs = std::filesystem;
  constexpr const char* kExpected = "expected a Hugging Face folder or a GGUF file";
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found && !MayExist(path)) {
    return NotFound(fmt::format(
        "{}: no such file or folder, {}{}", path, kExpected,
        LooksLikeName(path) ? " (models are not downloaded: give one that is on this machine)"
                            : ""));
  }
  if (fs::is_directory(status)) return ModelKind::kFolder;
  if (path.ends_with(".safetensors")) {
    return InvalidArgument(fmt::format(
        "{}: holds weights alone, expected the folder that it is in, or a GGUF file", path));
  }
  return ModelKind::kGguf;
}

Result<ModelFiles> OpenModel(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const ModelKind kind, KindOfModel(path));
  ModelFiles files;
  files.path = path;
  files.gguf = kind == ModelKind::kGguf;
  if (files.gguf) {
    OKV_ASSIGN_OR_RETURN(std::unique_ptr<GgufFile> file, GgufFile::Open(path));
    OKV_ASSIGN_OR_RETURN(files.config, ReadGgufConfig(*file));
    files.tensors = std::move(file);
  } else {
    if (!MayExist(path + "/config.json")) {
      return NotFound(
          fmt::format("{}: has no config.json, expected a Hugging Face folder or a GGUF file{}",
                      path, Instead(path)));
    }
    auto tensors = SafetensorsModel::Open(path);
    if (tensors.status().code() == StatusCode::kNotFound) {
      return NotFound(tensors.status().message() + Instead(path));
    }
    OKV_RETURN_IF_ERROR(tensors.status());
    files.tensors = std::move(*tensors);
    OKV_ASSIGN_OR_RETURN(files.config, ReadHfConfig(path, *files.tensors));
  }
  files.config.path = path;
  Derive(files.config);
  OKV_RETURN_IF_ERROR(WeightBytes(files).status());  // the directory has what the family needs
  return files;
}

}  // namespace omnikv
