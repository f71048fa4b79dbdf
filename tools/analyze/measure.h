// What the subcommands of analyze share: the texts that they measure on, the model, and the file
// that they write.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/measured_texts.h"
#include "flags.h"

namespace omnikv::tools {

struct MeasureFlags {
  EngineFlags engine;
  std::vector<std::string> files;
  int64_t tokens = 4096;  // of a document made up
  int docs = 2;
  uint64_t seed = 1000;  // other documents than those that `eval` makes by default
  int32_t window = 32;   // the last rows of a text
  std::string out;
  bool json = false;
};

// --file, --docs, --tokens and --seed.
void AddTextFlags(CLI::App& sub, MeasureFlags& f, const std::string& tokens_help);
// --file, --window, --docs, --tokens, --seed, --out, --json, and those of the engine.
void AddMeasureFlags(CLI::App& sub, MeasureFlags& f, const std::string& tokens_help,
                     const std::string& out_help);

// One measure of a model.
struct Measure {
  const char* activity;  // "measuring heads"
  std::function<Status(const EngineCore& core, std::span<const std::vector<int32_t>> texts)> check;
  std::function<Status(EngineCore& core, std::span<const std::vector<int32_t>> texts,
                       const MeasureProgress& progress)>
      run;
  // The file, where MeasureFlags::out may name one, and what is printed.
  std::function<std::string(const EngineCore& core)> file;
  std::function<std::string(const Engine& engine, size_t n_texts)> printed;
};

void AddAnalyzeAnchors(CLI::App& analyze, Command& command);
void AddAnalyzeHeads(CLI::App& analyze, Command& command);
void AddAnalyzeIndex(CLI::App& analyze, Command& command);

// Makes the texts, loads the model, measures, writes the file and prints.
Status RunMeasure(const MeasureFlags& f, const Measure& measure);

}  // namespace omnikv::tools
