// What the layers of a group of sequences keep where its policy chooses some rows and forgets the
// others: where the rows of a step stand, and which of them move (docs/decisions/045, 057, 075).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "bank/bank.h"
#include "bank/declared_reads.h"
#include "bank/prompt_stage.h"
#include "bank/state_stream.h"

namespace omnikv {

// The positions that go with the rows of the layers that policies govern: for each of them, or for
// the first of those whose rows lie in the same blocks.
std::vector<StateSpec> PositionsSpecs(const BankConfig& bank, const Keeps& keeps);

// The layers that policies govern fall into kept classes. Layers of one class keep as many rows and
// lie in one table of the bank, so a token has the same row in each. Where all layers keep as many,
// there is a class for each table; else each layer is a class. Classes may share a table: it then
// has room for the one that keeps most.
//
// A layer whose KV heads are apart (StreamSpec::heads_apart) is a class in which each head has lost
// tokens of its own. What is one sequence, and one row, in the step is one for each head there
// (LocateRowsArgs).
//
// Enqueues at record time, like a policy. Sequences are named by their number `q` in SeqMeta and by
// their number `seq` in the bank. Thread-compatible.
class KeptRows {
 public:
  // REQUIRES layers of one head class, or with heads apart: the moves of a row take all KV heads.
  static Result<std::unique_ptr<KeptRows>> Create(Backend& backend, Bank& bank, const Keeps& keeps,
                                                  int32_t n_seqs, int32_t max_rows);
  size_t Bytes() const;

  // Bank::Append and Bank::Truncate. `chooses`: the step that follows ends in a choice of rows.
  Status Append(int32_t q, int32_t seq, int64_t n, bool prefill, bool chooses);
  // Bank::AppendWhole, for the first prompt. `rows_of`: as EndPrompt.
  Status AppendWhole(int32_t seq, int64_t n, std::span<const int64_t> rows_of = {});
  // kResourceExhausted where the layers have no room for a turn of `n` tokens, or for that many of
  // an answer.
  Status CheckRoom(int32_t seq, int64_t n) const;
  // Steps that chose at every step can be cut by kEvictionLog tokens, or to nothing.
  void Truncate(int32_t q, int32_t seq, int64_t length);
  // Whether a prompt of the sequence has come to its end.
  bool Prompted(int32_t q) const { return prompted_[static_cast<size_t>(q)]; }
  // Whether a prompt of it that ends now ends in a choice of rows.
  bool ChoosesAfterPrompt(int32_t q) const { return !keeps_.first_prompt || !Prompted(q); }
  // The prompt is in; rows were chosen, or not. `rows_of`: how many each list of each layer keeps
  // where that is not for Keeps::RowsAfter to say, by the policy's numbers; else empty.
  void EndPrompt(int32_t q, int32_t seq, bool chose, std::span<const int64_t> rows_of = {});
  // q is a fork of `from_q` of another group, or a new sequence (from null).
  void Begin(int32_t q, int32_t seq, const KeptRows* from, int32_t from_q);

  // q is a sequence that the bank imported.
  void Resume(int32_t q, int32_t seq, bool prompted) {
    prompted_[static_cast<size_t>(q)] = prompted;
    UploadGone(q, seq);
  }
  // Tokens lost by choice in a governed layer, evictions apart: the fewest, and by layer (the head
  // that lost fewest) where these differ, else empty.
  int64_t Gone(int32_t q) const { return gone_of_[static_cast<size_t>(q)].least; }
  std::span<const int64_t> LayerGone(int32_t q) const {
    return gone_of_[static_cast<size_t>(q)].by_layer;
  }
  const StateStreams& positions() const { return positions_; }

  // The rows and sequences of a step, in the coordinates of a class; `prefill` and decode rows of
  // one step have their own.
  struct Located {
    RowMeta* rows;
    SeqMeta* seqs;
  };
  // Enqueues it. Before anything of the step that reads K/V. `stage`: as Retain; no position is
  // written then.
  void Locate(const RowMeta* rows, int32_t n_rows, const SeqMeta* seqs, bool prefill,
              const PromptStage* stage);
  // REQUIRES that it governs the layer; and, of the first layer that it governs, that there is one.
  Located Of(int32_t layer, bool prefill) const { return At(ClassOf(layer), prefill); }
  Located OfFirst(bool prefill) const { return At(0, prefill); }
  // Whether `layer` loses rows: whether it is one of the global-attention layers.
  bool Governs(int32_t layer) const { return class_of_[static_cast<size_t>(layer)] >= 0; }
  // Tells a view of a governed layer where the positions are.
  void SetPositions(int32_t layer, KvView& view) const {
    view.pos = PositionsOf(layer);
    view.pos_lists = ListsOf(classes_[ClassOf(layer)]);
  }
  // Enqueues the moves of a layer's rows, after its attention. `seqs` are the step's own. `stage`:
  // where the rows of a prompt that passes layer by layer are; null: in the bank.
  void Retain(int32_t layer, const Retained& retained, const SeqMeta* seqs, bool prefill,
              const PromptStage* stage);

 private:
  struct Class {
    int32_t table = 0;
    int32_t number = 0;           // of its first layer, as the policy counts
    std::vector<int32_t> layers;  // of the bank, ascending
    int32_t heads = 1;            // that are apart; their tables follow one another
    size_t first_head = 0;        // among those of all classes
    size_t first_plane = 0;       // of its positions; those of its layers follow one another
  };
  // By class, one after another.
  struct Place {
    size_t max_rows = 0;
    Buffer rows;  // RowMeta [heads of all classes, max_rows]
    Buffer seqs;  // SeqMeta [heads of all classes, n_seqs]
  };

  KeptRows(Backend& backend, Bank& bank, const Keeps& keeps, int32_t n_seqs)
      : backend_(backend),
        bank_(bank),
        keeps_(keeps),
        n_seqs_(n_seqs),
        prompted_(static_cast<size_t>(n_seqs)),
        gone_of_(static_cast<size_t>(n_seqs)) {}
  void MakeClasses();
  Status OpenPositions();
  size_t ClassOf(int32_t layer) const {
    return static_cast<size_t>(class_of_[static_cast<size_t>(layer)]);
  }
  Located At(size_t of_class, bool prefill) const {
    const Place& place = places_[prefill ? 1 : 0];
    const size_t head = classes_[of_class].first_head;
    return {place.rows.as<RowMeta>() + head * place.max_rows,
            place.seqs.as<SeqMeta>() + head * static_cast<size_t>(n_seqs_)};
  }
  // Lists that rows of its layers have positions and choices for.
  int32_t ListsOf(const Class& c) const { return c.heads > 1 ? 1 : keeps_.lists; }
  int32_t* GoneOfClass(const Class& c) const {
    return gone_.as<int32_t>() + c.first_head * static_cast<size_t>(n_seqs_);
  }
  // Rows that each list of a class keeps of a sequence of so many tokens. `rows_of`: as EndPrompt.
  std::vector<int64_t> RowsOf(const Class& c, int64_t tokens,
                              std::span<const int64_t> rows_of) const;
  int32_t* PositionsOf(int32_t layer) const { return plane_of_layer_[static_cast<size_t>(layer)]; }
  EvictionLog LogOf(int32_t layer) const;
  void UploadGone(int32_t q, int32_t seq);

  Backend& backend_;
  Bank& bank_;
  Keeps keeps_;
  int32_t n_seqs_;
  std::vector<Class> classes_;
  size_t n_heads_ = 0;             // Class::heads of all
  std::vector<int32_t> class_of_;  // by layer of the bank; -1: not governed
  std::vector<int32_t> tables_;    // that classes lie in
  std::vector<bool> prompted_;     // [n_seqs]: a prompt came to its end
  struct GoneOf {
    int64_t least = 0;
    std::vector<int64_t> by_layer;  // as the policy counts them; empty: the same in all
  };
  std::vector<GoneOf> gone_of_;  // [n_seqs]
  Buffer gone_;                  // int32, of class after class: [n_seqs, heads]
  // Positions of the tokens that are held, [rows, lists]: PositionsSpecs. Of each governed layer,
  // class after class: where they lie, in the backend's memory.
  StateStreams positions_;
  Buffer position_planes_;                // int32* [governed layers]
  std::vector<int32_t*> plane_of_layer_;  // by layer of the bank; null: none
  std::array<Place, 2> places_;
  Buffer log_rows_, log_length_, log_victim_, log_pos_;  // of layer after layer: EvictionLog
};

}  // namespace omnikv
