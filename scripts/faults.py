"""The faults that mutants.py plants: for each, a file, a text that is there once, and what takes its
place. And which tests look for them, on a card and without one.
"""

from attend_faults import CHECKS_OF_ATTENTION, FAULTS_OF_ATTENTION
from choice_faults import CHECKS_OF_CHOICES, FAULTS_OF_CHOICES
from disk_faults import (DISK, DISK_LAYERS, FAULTS_OF_DISKS, HOLDINGS, HOST_BACKEND, NAMELESS,
                         PLACEMENT, PLAN_BANK, POSTED)
from index_faults import CHECKS_OF_INDEX, FAULTS_OF_INDEX
from row_faults import CHECKS_OF_ROWS_BY_HEAD, FAULTS_OF_ROWS_BY_HEAD
from set_faults import FAULTS_OF_SETS, REF_SETS, SETS
from value_faults import CHECKS_OF_VALUES, FAULTS_OF_VALUES

KERNELS = "src/backend/cuda/kernels/"
CPU = "src/backend/cpu/"
SCORE_OPS = "src/backend/score_ops.h"
STEP_CHOICE = "src/policy/step_choice.cc"
TOVA, QUEST, DUO, KCACHE, H2O, STRIDED, KASCADE, PYRAMIDKV = (
    f"src/policy/{p}/{p}.cc"
    for p in ("tova", "quest", "duo", "kcache", "h2o", "strided", "kascade", "pyramidkv"))
BLOCK_CHOICE = "src/policy/block_choice.cc"
AWAY, LAST_ROWS, RESIDENCY = (
    f"src/bank/{f}.cc" for f in ("away_attention", "last_rows", "residency"))
IMAGE = "src/bank/bank_image.cc"
SEGMENTS, SEGMENT_FILES, STORE, READING, KEPT = (f"src/engine/{f}.cc" for f in (
    "context_segments", "segment_files", "context_store", "context_reading", "kept_contexts"))
FETCHED = "src/bank/fetched_units.cc"
LOCATE = "src/backend/locate_rows.h"
BANK_CONFIG, PROMPT_STAGE = "src/bank/bank_config.cc", "src/bank/prompt_stage.cc"
STREAMING, MEMORY = "src/policy/streaming/streaming.cc", "src/base/memory.cc"
TILES, SIMILARITY = "src/policy/kascade/tile_prompt.cc", "src/policy/layer_similarity.cc"
SPARSE_PROMPT = "src/policy/omnikv/sparse_prompt.cc"
TOP_P = "src/policy/omnikv/top_p"
COST, COMBINATIONS = "src/engine/policy_cost.cc", "src/policy/combinations.cc"
COMPOSITIONS = "src/engine/compositions.cc"
EXPECTED = "src/policy/expected_attention/expected_attention.cc"
WINDOW_CHOICE = "src/policy/window_choice.cc"  # snapkv and pyramidkv
KEY_BLOCKS, BLOCK_OPS = (f"src/policy/blocks/{f}.cc" for f in ("key_blocks", "block_ops"))
INFLLM = "src/policy/infllm/"
KVZIP = "src/policy/kvzip/kvzip.cc"
READ_PICTURE = "src/engine/read_picture.cc"
CHUNK_SCORES = "src/policy/kvzip/chunk_scores.cc"
OMNIKV_DUO = "src/policy/omnikv_duo/omnikv_duo.cc"
# Name -> file, what stands there once, what is put in its place.
FAULTS = {
    "merge_sums_unweighted": (
        KERNELS + "attend_merge.cuh", "sum += own.y * weights[i];", "sum += own.y;"),
    "heads_of_96_and_128_left_to_the_generic_kernel": (  # the same numbers: only names tell
        KERNELS + "attend.cu", "kv.dk == 96 || kv.dk == 128 ||", ""),
    "window_one_token_wider": (
        KERNELS + "attend_plan.cuh", "max(row.pos + 1 - s.window, 0)", "max(row.pos - s.window, 0)"),
    "prompts_see_one_token_ahead": (
        KERNELS + "prefill_attend.cu", "return min(end, p + 1);", "return min(end, p + 2);"),
    "residual_added_unscaled": (
        KERNELS + "matvec.cuh", "atomicAdd(part.y + out, p.scale * a);", "atomicAdd(part.y + out, a);"),
    "eight_rows_lose_low_bits": (
        KERNELS + "matvec_stationary.cu", "make_float4(large[0] + small[0],", "make_float4(large[0],"),
    "last_tie_not_chosen": (
        KERNELS + "topk.cu", "if (key > threshold || n_equal < ties) {",
        "if (key > threshold || n_equal + 1 < ties) {"),
    "prompts_with_passes_are_read_together": (
        "src/engine/scheduler_steps.cc",
        "rows.PassesByLayer(s.member) || rows.AwaitsPasses(s.member)", "rows.PassesByLayer(s.member)"),
    "pictures_take_all_heads_for_the_first": (
        READ_PICTURE, "(kv_.pos_lists > 1 ? kv_head : 0)", "(kv_.pos_lists > 1 ? 0 * kv_head : 0)"),
    "pictures_widen_windows_by_a_token": (
        READ_PICTURE, "int64_t{pos} + 1 - s.window", "int64_t{pos} - s.window"),
    "pictures_show_all_of_a_group": (
        READ_PICTURE, "(apart > 0 ? row.seq / apart : row.seq) != watched.member",
        "(apart > 0 ? row.seq / apart : row.seq) < 0"),
    "requests_with_pictures_run_ahead": (
        "src/engine/scheduler_steps.cc", "!s->request.on_reads &&", ""),
    "far_places_of_a_step_are_one": (INFLLM + "infllm.h", "prefill ? 1 : 0", "prefill ? 0 : 0"),
    "generated_rows_are_for_everyone": (
        "src/engine/kept_contexts.cc", "own ? common",
        "own || from.dense_rows > 0 ? common"),
    "samplers_do_not_know_what_the_device_drew": (
        "src/engine/stepper.cc", "if (draws->samplers[r] != nullptr) draws->samplers[r]->Take",
        "if (rows.empty()) draws->samplers[r]->Take"),
    "a_device_draws_for_one_row_too_few": (
        "src/engine/stepper.cc", "n_rows += group.prefill ? 0 : group.n_rows",
        "n_rows += group.prefill ? 0 : group.n_rows - 1"),
    "other_texts_are_the_same": (
        "src/engine/same_text.cc", "if (of_kept.compare(0, common, of_prompt, 0, common) != 0)",
        "if (common > 99)"),
    "a_respelled_prompt_has_the_tokens_of_the_other": (
        "src/engine/scheduler.cc", "prompt.begin() + same.prompt, prompt.end()",
        "prompt.begin() + same.kept, prompt.end()"),
    "steps_ahead_are_not_counted": (
        "src/engine/scheduler_steps.cc", "  CountStep(rows);\n  std::vector<int32_t> drawn;",
        "  std::vector<int32_t> drawn;"),
    "hits_of_the_last_member_alone": (
        "src/bank/slots.cc", "counted[3 * (first + static_cast<size_t>(seq)) + i]",
        "counted[3 * (first + seqs - 1) + i]"),
    "preempted_blocks_stay_excluded": (
        "src/policy/blocks/kept_state.cc", "c < n_choosers() && preselects_; ++c",
        "c < 0 && preselects_; ++c"),
    "preempted_scores_are_of_number_0": (
        "src/policy/omnikv/filter_scores.h", "(seq * rows + r) * stride_",
        "(0 * seq * rows + r) * stride_"),
    "preempted_choices_are_of_number_0": (
        "src/policy/blocks/kept_state.cc", "choice().index(c) + seq * ListWords()",
        "choice().index(c) + 0 * seq * ListWords()"),
    "equals_preempt_equals": (
        "src/engine/scheduler.h", ".id = std::numeric_limits<Id>::max()", ".id = 0"),
    "the_waiting_wait_for_the_preempted": (
        "src/engine/scheduler.cc",
        "status.code() == StatusCode::kResourceExhausted && OthersGoOn();",
        "status.code() == StatusCode::kResourceExhausted &&"
        " (OthersGoOn() || !swapped_.empty());"),
    "newer_prompts_go_first": (
        "src/engine/scheduler_steps.cc", "s.turn < next->turn", "s.turn > next->turn"),
    "a_promise_is_not_kept": (
        "src/engine/scheduler_memory.cc", "std::ssize(s.tokens) + kAhead >= s.promised",
        "std::ssize(s.tokens) + kAhead >= 2 * s.promised"),
    "pinned_contexts_make_room": (KEPT, "if (pinned) return", "if (pinned && seq < 0) return"),
    "pinned_files_make_room": (STORE, "if (Pinned(*c)) continue;", ""),
    "longer_contexts_replace_pinned_files": ("src/engine/context_writes.cc", "if (Pinned(*one)) continue;", ""),
    "a_saved_context_is_not_checked": (
        "src/io/checked_file.cc", "if (sum.Value() == checksum_) return {};", "return {};"),
    "a_stored_context_is_not_checked": (
        "src/io/checked_reader.cc", "if (sum_.Value() != header_.checksum) return Damaged(disk_->path());", ""),
    "a_stored_context_is_kept_though_its_reading_failed": (READING, "if (!Cut(*end)) return *end;", ""),
    "a_reading_that_goes_keeps_its_sequence": (READING, "if (seq_ >= 0) core_.bank->Free(seq_);", ""),
    "a_cancelled_reading_goes_on": ("src/engine/scheduler.cc",
        "if (IsBroughtFor(w.id)) EndBringing(Cancelled());", "if (IsBroughtFor(0)) EndBringing(Cancelled());"),
    "others_wait_for_the_store": ("src/engine/scheduler.cc",
        "const bool steps = !running_.empty();", "const bool steps = !running_.empty() && !bringing_;"),
    "a_request_of_the_store_loses_its_seat": (
        "src/engine/scheduler.cc", "bringing_ && bringing_->request != 0 ? 1 : 0;", "0;"),
    "a_request_of_the_store_is_promised_nothing": (
        "src/engine/scheduler_memory.cc", "if (bringing_) free -=", "if (false) free -="),
    "pieces_begin_where_their_run_began": (IMAGE, "{.at = run.at + at_,", "{.at = run.at,"),
    "a_range_begins_at_the_first_block": (
        IMAGE, "keeps_all ? static_cast<int32_t>(which.begin / bt) : 0;", "0;"),
    "segments_of_other_policies_are_the_same": (
        SEGMENTS, "if (dense < shape.tokens) sum.Add(made_by", "if (dense < 0) sum.Add(made_by"),
    "segments_of_prompts_and_of_answers_are_the_same": (SEGMENTS, "sum.Add(&dense, sizeof(dense));", ""),
    "segments_do_not_depend_on_those_before": (SEGMENTS, "sum.Add(last.data(), last.size());", ""),
    "segments_go_with_the_first_of_their_contexts": (SEGMENT_FILES, "++segment.needed;", "segment.needed = 1;"),
    "segments_that_other_servers_claimed_are_deleted": (SEGMENT_FILES,
        "if (!error && !ours && Time::clock::now() - changed < kMayBeNamed) continue;",
        "if (error && !ours) continue;"),
    "segments_that_other_servers_name_are_deleted": (STORE,
        "const auto named = LookAgain();", "const std::optional named = std::unordered_set<std::string>();"),
    "what_others_have_in_common_makes_no_difference": (
        STORE, "static_cast<double>(tokens + shared)", "static_cast<double>(tokens + 0 * shared)"),
    "all_of_a_context_is_read": (STORE, "const bool cut = !shape_.others &&", "const bool cut = false &&"),
    "a_segment_of_another_name_is_read": (READING,
        "if (reader_->text() == TextOfSegment(files_.segments[file].name)) return {};",
        "if (file < files_.segments.size()) return {};"),
    "a_context_is_cut_behind_its_damage": (
        READING, "static_cast<int64_t>(whole_) *", "static_cast<int64_t>(whole_ + 1) *"),
    "requests_wait_for_what_is_written": (
        KEPT, "if (oldest == contexts_.end() || hold == ContextStore::Hold::kNone)",
        "if (hold == ContextStore::Hold::kNone)"),
    "what_is_saved_makes_room": (
        KEPT, "c->seq == but || hold == ContextStore::Hold::kStays", "c->seq == but"),
    "what_makes_room_is_written_on": (KEPT, "if (store_ != nullptr) store_->GiveUp(seq);", ""),
    "what_waits_to_be_written_goes_with_the_scheduler": (
        "src/engine/scheduler.cc", "store_->Flush();  // before", "// before"),
    "reads_of_a_ring_are_not_awaited": ("src/io/disk_reader.cc", "    if (ring_) Await(buffer);", ""),
    "pieces_that_are_held_are_read_over": (
        "src/io/disk_reader.cc", "  next_ += bytes;\n", "  next_ += bytes;\n  free_.push_back(buffer);\n"),
    "heads_apart_are_as_long_as_the_first": (LOCATE, "a.Seq(s, h)", "a.Seq(s, 0)"),
    "located_rows_keep_their_positions": (LOCATE, "a.rows[r].pos);", "row.pos);"),
    "rotation_sign": (
        KERNELS + "rows.cu", "high.v[j] = h * c + l * s;", "high.v[j] = h * c - l * s;"),
    "penalty_of_the_wrong_tokens": (
        KERNELS + "sample.cu", "keys[j] = KeyOf((bits >> j & 1) != 0 ?",
        "keys[j] = KeyOf((bits >> j & 1) == 0 ?"),
    "post_norm_skipped": (
        "src/backend/fusion.cc", "in->y == linear->y && in->post_norm == nullptr &&",
        "in->y == linear->y &&"),
    "window_of_queries_starts_late": (  # the first of them the next step displaces
        "src/policy/omnikv/omnikv.cc", "step.prompt_end - scores_.window() - step.first_pos",
        "step.prompt_end - scores_.window() + 2 - step.first_pos"),
    "turned_to_one_past_the_budget": (
        "src/policy/turn_queries.cu", "max(from, a.least), a.most)", "max(from, a.least), a.most + 1)"),
    "away_keeps_too_few_rows": (LAST_ROWS, "BlocksFor(config.tokens) + 2",
                                "BlocksFor(config.tokens)"),
    "away_rows_of_another_place_go_home": (LAST_ROWS, ".by_table = true", ".by_table = false"),
    "away_part_is_lost": (AWAY, ".n_parts = 2,", ".n_parts = 1,"),
    "away_rows_come_one_block_late": (
        LAST_ROWS, "t / bt % blocks_) * bt", "(t / bt + 1) % blocks_) * bt"),
    "units_are_read_before_they_are_there": (
        FETCHED, "backend_.Join(Lane::kMain, Lane::kIn);\n  Redirect", "Redirect"),
    "units_come_before_they_are_chosen": (FETCHED, "backend_.Join(Lane::kIn, Lane::kMain);", ""),
    "units_outlive_a_turn": (FETCHED, "slots_.Reset(seq);", "static_cast<void>(seq);"),
    "last_rows_stand_behind_one_sequence": (
        FETCHED, ".first_last = slots_of_.n_seqs * slots_of_.n_slots",
        ".first_last = slots_of_.n_slots"),
    "a_piece_counts_as_a_row": (FETCHED, "static_cast<uint64_t>(piece_),", "uint64_t{1},"),
    "layers_that_share_a_choice_list_the_first_ones": (
        RESIDENCY, "if (!selected_[selection]) r_", "if (selection == 0 && !selected_[0]) r_"),
    "candidates_outlive_a_turn": (
        RESIDENCY, "if (candidates_ != nullptr) candidates_->Reset(seq);", ""),
    "dense_steps_read_the_last_rows_alone": (RESIDENCY, "attend.kv = r_.bank_.View(layer);  //", "//"),
    "values_of_candidates_are_not_awaited": (RESIDENCY, "r_.candidates_->AwaitValues();", ""),
    "keys_of_candidates_are_not_awaited": (
        FETCHED, "backend_.Join(Lane::kMain, Lane::kIn);\n  copy", "copy"),
    "scales_come_with_the_values": (
        FETCHED, "values = home.n_kv_heads * home.v.head_bytes;", "values = home.k.row_bytes - to_values;"),
    "rows_have_no_gap_on_a_card": (KERNELS + "working_set.cu", "!kPart || i <", "true || i <"),
    "last_rows_of_a_prompt_stay_there": (
        RESIDENCY, "last->StoreHome(layer,", "if (!rows_.prefill) last->StoreHome(layer,"),
    "last_rows_are_all_there_is": (RESIDENCY, "place.home = place.kv;", ""),
    "last_rows_of_another_sequence": (
        LAST_ROWS, "static_cast<int32_t>(q * blocks_ + ", "static_cast<int32_t>("),
    "last_rows_of_a_file_are_left": (
        LAST_ROWS, "if (filled_[static_cast<size_t>(q)]) return;", "return;"),
    "copies_of_a_policy_are_not_counted": (PLACEMENT, "std::max(scores, plan.policy)", "scores"),
    "tables_have_room_for_the_context": (
        BANK_CONFIG, "if (table.max_held == 0) return all;", "return all;"),
    "a_stage_does_not_await_another_sequence": (
        "src/bank/bank.cc",
        "if (s.seq != seq && s.tokens > 0) backend_.Join(Lane::kMain, Lane::kIn);", ""),
    "rows_stand_in_a_stage_as_in_the_bank": (
        "src/bank/bank.h", "InOrder(streams_[stream].layer) ? in_order : home", "home + 0 * in_order"),
    "sets_are_primed_from_places_of_the_bank": (
        "src/bank/working_sets.cc", "primes ? bank_.StageView(first_layer_) :",
        "primes && false ? bank_.StageView(first_layer_) :"),
    "stages_have_room_for_all_sequences": (
        "src/bank/bank_config.h", "layer.InBothTiers() ?", "layer.OnHost() ?"),
    "a_prompts_stage_has_room_for_the_context": (
        PROMPT_STAGE, "Allocate(Bytes(config, room)", "Allocate(Bytes(config, config.max_tokens)"),
    "streaming_masks_what_it_should_drop": (
        STREAMING, "return {sinks_, std::max(sinks_, length + 1 - (budget_ - sinks_))};",
        "static_cast<void>(length);\n    return {};"),
    "what_is_reserved_is_touched": (
        MEMORY, "MAP_ANONYMOUS | MAP_NORESERVE", "MAP_ANONYMOUS | MAP_POPULATE"),
    "states_of_the_whole_context_count": (
        COST, "StatesHeld(config, *policy, bank, tokens);",
        "StatesHeld(config, *policy, bank, plan.context);"),
    "a_share_may_be_exceeded": (COST, "if (cost && of(*cost) > share) {",
                                "if (cost && of(*cost) > 1.05 * share) {"),
    "every_knob_rises": (COST, "if (falls_) i = last_ - i;", ""),
    "policies_of_a_pair_are_exchanged": (
        COMBINATIONS, "fmt::runtime(pair->why), a->name, b->name",
        "fmt::runtime(pair->why), b->name, a->name"),
    "who_forgets_rows_may_lie_beside_the_host": (
        COMPOSITIONS, "return policy.Kept().rows > 0;", "return policy.Kept().rows > 1000;"),
    "tova_maximum_of_heads": (
        TOVA, ".heads = HeadReduce::kMean", ".heads = HeadReduce::kMax"),
    "tova_scale_missing": (TOVA, ".scale = attend.scale", ".scale = 1"),
    "tova_keeps_one_more_of_a_prompt": (
        STEP_CHOICE, "memory_, {.budget = budget_}", "memory_, {.budget = budget_ - 1}"),
    "tova_scores_of_logits": (TOVA, ".lse = attend.lse", ".lse = nullptr"),
    "snapkv_window_off_by_one": (
        "src/policy/window_choice.h", "Recent() const final { return window_; }",
        "Recent() const final { return window_ + 1; }"),
    "snapkv_queries_off_by_one": (WINDOW_CHOICE, ".window = window_,", ".window = window_ - 1,"),
    "snapkv_maximum_of_the_group": (
        WINDOW_CHOICE, ".heads = HeadReduce::kMean", ".heads = HeadReduce::kMax"),
    "snapkv_scale_missing": (WINDOW_CHOICE, ".scale = attend.scale", ".scale = 1"),
    "snapkv_does_not_pool": (WINDOW_CHOICE, ".kernel = kernel_,", ".kernel = 1,"),
    "snapkv_last_query_alone": (
        WINDOW_CHOICE, ".queries = QueryReduce::kSum", ".queries = QueryReduce::kLast"),
    "pyramidkv_steps_by_one_layer_more": (PYRAMIDKV, "/ (layers - 1))", "/ layers)"),
    "pyramidkv_stands_on_its_head": (
        PYRAMIDKV, "most - layer * ((most", "least + layer * ((most"),
    "pyramidkv_beta_is_fixed": (PYRAMIDKV, "least = mean / beta;", "least = mean / 20;"),
    "pyramidkv_short_prompts_are_as_steep": (
        PYRAMIDKV, "      least = 2 * mean - most;\n", ""),
    "layers_stand_where_the_largest_does": (
        "src/bank/kept_rows.cc", "bank_.LayerGone(seq, in.layers.front())",
        "bank_.Gone(seq, classes_[c].table)"),
    "kvzip_sees_the_whole_context": (
        CHUNK_SCORES, "plan.Add({.begin = begin, .end = end});",
        "plan.Add({.begin = static_cast<int32_t>(chunk.sinks), .end = end});"),
    "kvzip_last_row_alone": (
        CHUNK_SCORES, ".queries = QueryReduce::kMax", ".queries = QueryReduce::kLast"),
    "kvzip_last_step_of_a_pass_alone": (
        CHUNK_SCORES, ".accumulate = step.first_pos > step.prompt_end", ".accumulate = false"),
    "kvzip_chooses_one_fewer": (
        "src/policy/kvzip/share.cc", "int64_t left = Chosen(tokens);",
        "int64_t left = Chosen(tokens) - 1;"),
    "kvzip_layers_hold_what_the_first_head_keeps": (
        "src/policy/kvzip/head_rows.cc",
        "most.push_back(*std::max_element(at, at + n_kv_heads_));", "most.push_back(*at);"),
    "kvzip_spares_the_first_tokens_of_every_turn": (
        KVZIP, "  if (before > 0) share.sinks = 0;\n", ""),
    "kvzip_repeats_the_whole_context_in_every_turn": (
        KVZIP, "auto begin = static_cast<size_t>(heads_.Tokens(seq));", "size_t begin = 0 * seq;"),
    "kvzip_later_chunks_begin_where_heads_keep_nothing": (
        CHUNK_SCORES, "score.out + at + chunk.first[list];", "score.out + at + 0 * list;"),
    "kvzip_later_chunks_accumulate_over_layers": (
        CHUNK_SCORES, "  if (score.accumulate) copy(/*back=*/true);\n", ""),
    "kvzip_passes_see_the_chunks_before": (
        CHUNK_SCORES, "{first + begin, first + end}", "{first, first + end}"),
    "kvzip_files_forget_what_was_chosen_of": (
        "src/policy/kvzip/head_rows.cc", "static_cast<int32_t>(Tokens(seq))",
        "static_cast<int32_t>(*std::ranges::max_element(Of(seq)))"),
    "parts_of_a_prompt_are_two_chunks": (
        "src/engine/row_group.cc", "(position / chunk + 1) * chunk", "(position / chunk + 2) * chunk"),
    "kvzip_scores_of_the_first_head": (
        CHUNK_SCORES, "const int32_t n_seqs = context_.n_kv_heads / lists;",
        "const int32_t n_seqs = 1;"),
    "heads_apart_have_no_room_for_a_prompt": (
        "src/bank/bank_config.cc", "std::max(held, BlocksFor(table.prompt_tokens))", "held"),
    "layers_of_heads_apart_count_each_others_blocks": (
        "src/bank/bank.cc", "BlocksOf(TablesOf(s), seq)", "BlocksOf(Sharing(s.spec.table), seq)"),
    "layers_of_heads_apart_have_the_positions_of_the_first": (
        "src/bank/kept_rows.cc", "bank_.View(classes_[c].layers[0]).block_table",
        "bank_.View(classes_[0].layers[0]).block_table"),
    "heads_apart_have_no_room_for_later_turns": (
        PLACEMENT, "std::min(plan.context, mean + 1) + later;",
        "std::min(plan.context, mean + 1) + 0 * later;"),
    "heads_apart_have_room_for_any_turn": (
        "src/bank/kept_rows.cc", "rows + n * tables <= most", "rows + n <= most"),
    "parked_rows_do_not_come_back": (
        PROMPT_STAGE, "backend_->Upload(rows_.as<std::byte>(), from.data(), from.size());", ""),
    "passes_by_layer_share_their_residual": (
        "src/engine/stepper.cc", "total() + before_ + row", "total() + row"),
    "a_prompt_by_layer_has_room_for_all_its_rows": (
        PLAN_BANK, "plan.heads_apart && held > 0 && !plan.by_layer", "plan.heads_apart && held > 0"),
    "heads_apart_by_layer_have_room_for_what_the_first_keeps": (
        "src/bank/kept_rows.cc", "std::ranges::copy(rows, first);",
        "std::fill_n(first, c.heads, rows.front());"),
    "passes_push_the_prompt_out_of_windows": (
        "src/engine/row_group.cc", "if (length(member) > prompt_end) {",
        "if (length(member) > 2 * prompt_end) {"),
    "passes_stay_in_windows": (
        "src/engine/core.cc", "prompt_end, length + 1 - tables[i].window);",
        "prompt_end, std::min(length, prompt_end));"),
    "windows_stand_between_the_tables_of_heads": (
        PLAN_BANK, "    if (window == 0) continue;\n    const auto [table, added]",
        "    const auto [table, added]"),
    "heads_apart_keep_what_the_first_keeps": (
        "src/bank/kept_rows.cc", "kept[static_cast<size_t>(head)]", "kept.front()"),
    "heads_apart_share_a_table": (
        "src/bank/kept_rows.cc", ".table_stride = bank_.HeadTableStride()", ".table_stride = 0"),
    "heads_apart_lose_what_the_first_lost": (
        "src/bank/kept_rows.cc", "bank_.Gone(seq, in.table + head)", "bank_.Gone(seq, in.table)"),
    "heads_apart_of_a_prompt_row_by_row": (
        "src/bank/kept_rows.cc", ".by_head = prefill", ".by_head = false"),
    "heads_apart_stored_in_another_order": (
        "src/model/forward.cc", "store.head_step = by_head ? n_rows : 1;", "store.head_step = 1;"),
    "heads_apart_put_back_in_one_place": (
        "src/model/forward.cc", "pick.from = from + (back ? h * a_head : 0);", "pick.from = from;"),
    "heads_apart_parted_in_the_first": (
        "src/bank/bank.cc", "TableOf(streams_[stream]).first != t.first",
        "streams_[stream].spec.table != static_cast<int32_t>(table)"),
    "heads_apart_have_the_blocks_of_one": (
        "src/bank/bank_config.cc", "i < Sharing(table); ++i", "i < 1; ++i"),
    "heads_apart_saved_without_the_others": (
        "src/bank/bank_image.cc", "for (const Table& t : tables) {",
        "for (const Table& t : tables.first(1)) {"),
    "passes_leave_their_rows": (
        "src/engine/stepper.cc", "  if (by_layer_ == nullptr) group_->CutTo(member_, total());\n",
        ""),
    "knorm_keeps_one_fewer": (  # and so do keydiff and snapkv
        "src/policy/prompt_choice.cc", "memory_, {.budget = budget_,", "memory_, {.budget = budget_ - 1,"),
    "knorm_of_the_next_sequence": (
        "src/policy/prompt_choice.cc", "attend.seqs + step.seq;", "attend.seqs;"),
    "knorm_is_keydiff": (
        "src/policy/knorm/knorm.cc", "KeyScoreKind::kNorm", "KeyScoreKind::kUnlike"),
    "keydiff_is_knorm": (
        "src/policy/keydiff/keydiff.cc", "KeyScoreKind::kUnlike", "KeyScoreKind::kNorm"),
    "keys_of_the_largest_norm": (KERNELS + "key_score.cu", "out[t] = -score;", "out[t] = score;"),
    "keys_have_another_anchor": (
        KERNELS + "key_score.cu", "own[at + j] += k.v[j] * inverse;", "own[at + j] += k.v[j];"),
    "expected_queries_of_sinks_count": (EXPECTED, ".skip = sinks_,", ".skip = 0,"),
    "expected_last_chunk_alone": (
        EXPECTED, ".accumulate = seen > 0 && seen == step.first_pos", ".accumulate = false"),
    "expected_next_position_alone": (EXPECTED, ".future = future_,", ".future = 1,"),
    "expected_scale_missing": (EXPECTED, ".scale = attend.scale,", ".scale = 1,"),
    "expected_without_values": (EXPECTED, ".values = values_}", ".values = false}"),
    "expected_sinks_compete": (EXPECTED, ".sinks = sinks_,", ".sinks = 0,"),
    "expected_epsilon_missing": (EXPECTED, ".epsilon = epsilon_,", ""),
    "expected_queries_stay_rotated": (
        EXPECTED, ".inv_freq = InvFreq(step.layer),\n                                     .out", ".out"),
    "moments_turned_the_other_way": (
        KERNELS + "expected.cu", "(low ? partner : -partner)", "(low ? -partner : partner)"),
    "moments_forget_the_distance_of_means": (
        KERNELS + "expected.cu", "(*out + share * (mean[x] - before[x])",
        "(*out + 0 * (mean[x] - before[x])"),
    "expected_covariance_counts_twice": (
        KERNELS + "expected.cu", "scale * scale / 2 * v", "scale * scale * v"),
    "h2o_forgets_what_earlier_queries_gave": (H2O, ".accumulate = true", ".accumulate = false"),
    "h2o_last_query_alone": (H2O, ".queries = QueryReduce::kSum", ".queries = QueryReduce::kLast"),
    "h2o_gives_up_recent_tokens": (H2O, ".recent = recent_}", ".recent = recent_ - 1}"),
    "h2o_chooses_recent_tokens_by_weight": (H2O, ".recent = recent_,", ".recent = 0,"),
    "h2o_sums_stay_behind": (H2O, "    kept.scores = Sums(step);\n", ""),
    "h2o_observed_is_a_plain_sum": (
        H2O, ".rule = observed_ ? AgeRule::kPerQuery : AgeRule::kNothing", ""),
    "h2o_maximum_of_the_group": (H2O, ".heads = HeadReduce::kMean", ".heads = HeadReduce::kMax"),
    "sums_of_the_wrong_step": (
        KERNELS + "score.cuh", "ScoresOf(a, seq, list, /*held=*/true)[unit]",
        "ScoresOf(a, seq, list, /*held=*/false)[unit]"),
    "tiles_start_one_row_late": (
        KERNELS + "score_tiles.cu", "max(0, w.first - w.first_pos)",
        "max(0, w.first - w.first_pos + 1)"),
    "tiles_see_the_next_token": (
        KERNELS + "score_tiles.cu", "e / 2 * 8 > w.first_pos + r) continue",
        "e / 2 * 8 > w.first_pos + r + 1) continue"),
    "tiles_forget_the_last_head": (
        KERNELS + "score_tiles.cu", "step % list_heads == 0, queries",
        "step % list_heads <= 1, queries"),
    "compact_leaves_scores": (
        KERNELS + "kept_rows.cu", "if (moves_scores && i < count) to",
        "if (moves_scores && i < 0 * count) to"),
    "evicts_recent_rows": (
        KERNELS + "kept_rows.cu", "if (!IsRecent(a, s, l, i)) {", "if (!IsRecent(a, s, l, i) || i < a.most) {"),
    "infllm_window_one_wider": (
        INFLLM + "infllm.cc", "AttnPlan::Dense(shape_.recent)", "AttnPlan::Dense(shape_.recent + 1)"),
    "infllm_blocks_are_whole_one_step_late": (
        INFLLM + "far_ops.h", "(n - sinks - recent) / block)", "(n - sinks - recent - 1) / block)"),
    "infllm_far_keys_turn_the_other_way": (
        INFLLM + "far_ops.cc", "static_cast<float>(x * c + y * s)", "static_cast<float>(x * c - y * s)"),
    "infllm_sums_start_anew": (
        INFLLM + "local_weights.cc", "t < p0 ? held[t % a.stride] : Real{0}", "Real{0 * held[0]}"),
    "infllm_steps_start_sums_anew": (
        INFLLM + "local_weights.cc", "t < n - 1 ? held[at + i] : Real{0}", "Real{0 * held[0]}"),
    "infllm_steps_weigh_by_the_window_alone": (
        INFLLM + "infllm.cc",
        "                                                .lse = lse,\n", ""),
    "infllm_steps_weigh_one_token_less": (
        INFLLM + "local_weights.cc", "if (t >= n - a.shape.recent) sum", "if (t > n - a.shape.recent) sum"),
    "infllm_window_of_a_step_one_narrower": (
        INFLLM + "infllm.cc", ".min_recent = shape_.recent}", ".min_recent = shape_.recent - 1}"),
    "infllm_tokens_of_the_least_weight": (
        INFLLM + "local_weights.cc", "of_x > of_y :", "of_x < of_y :"),
    "infllm_maximum_of_heads": (
        INFLLM + "far_memory.cc", ".heads = HeadReduce::kSum", ".heads = HeadReduce::kMax"),
    "infllm_chunks_choose_by_their_first_query": (
        INFLLM + "far_ops.cc", "for (int64_t r = 0; r < a.n_rows; ++r) {", "for (int64_t r = 0; r < 1; ++r) {"),
    "infllm_sees_weights_of_the_next_token": (
        INFLLM + "local_weights.cu", "t > at ||", "t > at + 1 ||"),
    "infllm_evicts_the_newest": (
        INFLLM + "far_ops.cu", "(its < own ||", "(its > own ||"),
    "quest_other_reduction": (
        QUEST, ": HeadReduce::kMax", ": HeadReduce::kSum"),
    "quest_last_page_competes": (QUEST, ".recent = 1,", ".recent = 0,"),
    "quest_prompts_make_no_bounds": (
        BLOCK_CHOICE, "if (step.prefill ? !rule_.own_keys : ", "if (step.prefill ? false : "),
    "blocks_of_generated_tokens_are_never_complete": (
        "src/policy/block_choice.h", "return rule_.current && at.tokens % Unit() == 0;",
        "return rule_.current && at.tokens % Unit() == 1;"),
    "quest_mean_std_has_lists_of_kv_heads": (
        QUEST, ".per_kv_head = !mean_std", ".per_kv_head = true"),
    "quest_mean_std_is_min_max": (
        QUEST, ".kind = mean_std ? SummaryKind::kMeanStd : SummaryKind::kMinMax,",
        ".kind = SummaryKind::kMinMax,"),
    "quest_variance_for_deviation": (
        KERNELS + "summary.cu", "sqrtf(sum / static_cast<float>(n))", "sum / static_cast<float>(n)"),
    "quest_deviation_of_a_sample": (
        KERNELS + "summary.cu", "sqrtf(sum / static_cast<float>(n))",
        "sqrtf(sum / static_cast<float>(max(n - 1, 1)))"),
    "quest_threads_without_tokens_deviate": (
        KERNELS + "summary.cu", "tokens_of(turn) * away * away", "away * away"),
    "omnikv_heads_read_the_first_list": (
        "src/policy/omnikv/token_lists.cc", "          .lists = lists_,\n", ""),
    "omnikv_best_of_the_group": (
        "src/policy/omnikv/filter_scores.cc", "per_kv_head() ? HeadReduce::kSum : HeadReduce::kMax",
        "HeadReduce::kMax"),
    "indexed_rescores_the_budget_alone": (
        "src/policy/omnikv/budget.cc", "static_cast<double>(settings.Int(\"rescore\"))", "1.0"),
    "indexed_sparse_layers_read_the_dense_layer_below": (
        "src/policy/omnikv/filter_layers.cc", "static_cast<size_t>(filter)])]",
        "static_cast<size_t>(filter)] + layers.Chooses(layer - 1))]"),
    "indexed_chooses_among_all": ("src/policy/omnikv/omnikv.cc", "scores, among)", "scores)"),
    "omnikv_sinks_compete": (
        "src/policy/omnikv/filter_scores.cc", ".sinks = sinks_,", ".sinks = 0,"),
    "omnikv_chunk_of_the_first_sequence": (
        SPARSE_PROMPT, "const SeqMeta* const seq = attend.seqs + step.seq;",
        "const SeqMeta* const seq = attend.seqs;"),
    "omnikv_chunk_by_its_last_query": (
        SPARSE_PROMPT, ".queries = QueryReduce::kSum", ".queries = QueryReduce::kLast"),
    "omnikv_chunk_by_logits": (SPARSE_PROMPT, "softmax_ ? attend.lse : nullptr", "nullptr"),
    "omnikv_chunk_sinks_compete": (SPARSE_PROMPT, ".sinks = sinks_});", ".sinks = 0});"),
    "omnikv_chunk_best_of_the_group": (
        SPARSE_PROMPT, "lists_ > 1 ? HeadReduce::kSum : HeadReduce::kMax", "HeadReduce::kMax"),
    "omnikv_short_chunk_chooses_as_a_long_one": (
        SPARSE_PROMPT, "ratio_ * n_rows, step.first_pos",
        "ratio_ * std::max<int64_t>(n_rows, chunk_), step.first_pos"),
    "session_keeps_half_a_chunk": (
        "src/engine/session.cc", "const int64_t whole = chunks_.WholeUpTo(held);",
        "const int64_t whole = held;"),
    "session_forgets_chunks_in_a_file": (
        "src/engine/session.cc", "PromptChunks(policy().PromptStepRows(), saved.chunks);",
        "PromptChunks(policy().PromptStepRows());"),
    "sessions_of_sparse_prompts_take_rows": (
        "src/engine/kept_contexts.cc", "(!own && !to.DensePrompts())", "false"),
    "omnikv_top_p_of_the_first_block": (
        TOP_P + ".cu", "for (int b = 0; b < n_blocks; ++b) total +=", "for (int b = 0; b < 1; ++b) total +="),
    "omnikv_top_p_one_tie_fewer": (
        TOP_P + ".cu", "(wanted - before + each - 1) / each", "(wanted - before) / each"),
    "omnikv_top_p_of_a_smaller_share": (
        TOP_P + ".h", "ceil(share * static_cast<double>(total))",
        "ceil(share * share * static_cast<double>(total))"),
    "omnikv_top_p_weighs_sinks": (
        TOP_P + ".h", "if (!(score > 0) || score >= kChosenFirst) return 0;",
        "if (!(score > 0)) return 0;"),
    "omnikv_top_p_of_the_newest_query": (
        TOP_P + ".h", "age < a.window && t <= p - age", "age < 1 && t <= p - age"),
    "omnikv_top_p_cuts_nothing": (
        "src/policy/omnikv/filter_scores.cc", "  if (!cuts()) return;\n", "  if (cuts()) return;\n"),
    "lists_share_a_ring": (
        KERNELS + "select.cu", "((int64_t{meta.seq} * a.lists + list) * a.ring + slot)",
        "(int64_t{meta.seq} * a.lists * a.ring + list + slot * a.lists)"),
    "kascade_best_of_the_group": (KASCADE, "HeadReduce::kSum", "HeadReduce::kMax"),
    "kascade_anchors_read_everything": (
        KASCADE, "    Choose(weights);\n  }\n", "    Choose(weights);\n    return;\n  }\n"),
    "kascade_no_map": (KASCADE, "  list.list_of = ListOf(step.layer);\n", ""),
    "kascade_prompts_without_map": (
        KASCADE, "anchor || lists_ == 1 ? nullptr : ListOf(step.layer)", "nullptr"),
    "kascade_anchors_of_prompts_read_everything": (
        KASCADE, "    prompt_.Choose(step, everything);\n  }\n",
        "    prompt_.Choose(step, everything);\n    return;\n  }\n"),
    "kascade_tiles_choose_their_own": (
        TILES, "candidates.push_back(first);", "candidates.push_back(first + n_rows);"),
    "kascade_tiles_of_the_last_row": (
        TILES, ".queries = QueryReduce::kSum,", ".queries = QueryReduce::kLast,"),
    "anchors_without_the_weight_inside": (
        SIMILARITY, "std::accumulate(of_head + n, of_head + seq.kv_len, 0.0)", "0"),
    "anchors_by_the_best_tile": (
        SIMILARITY, "std::min(least, share)", "std::max(least, share)"),
    "anchors_choose_by_their_followers": (
        SIMILARITY, "chosen_[static_cast<size_t>(i)][tile * heads + v]", "own[tile * heads + v]"),
    "anchors_importance_summed": (SIMILARITY, "= sum / n;", "= sum;"),
    "kascade_rounds_up": (SCORE_OPS, "least > 0 ? floor(part) : ceil(part)", "ceil(part)"),
    "kascade_weights_without_sums": (KASCADE, ".lse = attend.lse,", ""),
    "strided_on_one_grid": (SCORE_OPS, "p == 0 ? 1 << 30 : p & -p", "1"),
    "strided_sinks_compete": (STRIDED, ".sinks = sinks_,", ".sinks = 0,"),
    "strided_age_of_held_rows": (
        STEP_CHOICE, "step.steps != nullptr ? step.steps : attend.seqs", "attend.seqs"),
    "blocks_of_the_window_compete": (
        KEY_BLOCKS, "settings.Int(\"recent\") / block + 1", "settings.Int(\"recent\") / block"),
    "blocks_drop_the_last_sink": (
        KEY_BLOCKS, "(settings.Int(\"sinks\") + block - 1) / block", "settings.Int(\"sinks\") / block"),
    "blocks_mean_over_every_token": (
        KEY_BLOCKS, "rule.every = block / representatives_;", "rule.every = 1;"),
    "blocks_phase_by_position": (
        "src/policy/block_rule.h", "prompt + 1 + (n - 1 - prompt) / token_step * token_step",
        "1 + (n - 1) / token_step * token_step"),
    "blocks_every_step_chooses": (
        "src/policy/blocks/block_ops.h", "if (made < n && first == made)", "if (false)"),
    "blocks_weighed_by_one_query": (KEY_BLOCKS, "QueryReduce::kSum", "QueryReduce::kLast"),
    "blocks_weights_of_one_head": (KEY_BLOCKS, "HeadReduce::kMean", "HeadReduce::kMax"),
    "blocks_tokens_of_least_weight": (
        BLOCK_OPS, "return scores[x] > scores[y];", "return scores[x] < scores[y];"),
    "blocks_widened_to_one_side": (
        BLOCK_OPS, "(u + 1) * rule.block + a.widen", "(u + 1) * rule.block"),
    "blocks_excluded_are_read": (BLOCK_OPS, "a.bias != nullptr && a.bias[at + u] < 0", "false"),
    "blocks_excluded_count_as_read": (
        "src/policy/block_rule.h", "block) - Excluded(prompt) <= budget",
        "block) - 0 * Excluded(prompt) <= budget"),
    "blocks_kt_maximum_of_negatives": (
        BLOCK_OPS, "low[i] = high[i] = std::max(most[i], 0.0f);", "low[i] = high[i] = most[i];"),
    "blocks_kt_quest_by_group": (
        BLOCK_OPS, "a.keys == BlockKeys::kBoundsQuest ? head :", "false ? head :"),
    "blocks_kt_generated_compete": (BLOCK_OPS, "a.prompt_alone != 0 && u", "false && u"),
    "blocks_each_layer_chooses": (
        KEY_BLOCKS, ".layer_step = static_cast<int32_t>(settings.Int(\"layer_step\")),", ""),
    "blocks_best_head_of_the_group": (
        "src/policy/block_choice.h", "heads = HeadReduce::kSum", "heads = HeadReduce::kMax"),
    "sinks_one_unit_short": (
        KERNELS + "summary.cu", "unit < a.sinks ? kChosenFirst : score * share;\n      }\n    }\n  }",
        "unit + 1 < a.sinks ? kChosenFirst : score * share;\n      }\n    }\n  }"),
    "a_unit_is_complete_one_token_late": (SCORE_OPS, "seq.kv_len / unit};", "(seq.kv_len - 1) / unit};"),
    "a_unit_is_complete_when_it_begins": (
        SCORE_OPS, "seq.kv_len / unit};", "(seq.kv_len + unit - 1) / unit};"),
    "summary_skips_nothing": (KERNELS + "summary.cu", "t += turns * a.every", "t += turns"),
    "another_head_is_stored": (
        KERNELS + "kept_rows.cu", "HeadOfSlice(a.from, from, i, head)",
        "HeadOfSlice(a.from, from, i, to_head)"),
    "duo_window_off_by_one": (
        "src/policy/sinks_and_recent.h", "static_cast<int32_t>(recent);",
        "static_cast<int32_t>(recent) + 1;"),
    "duo_drops_one_too_many": (
        DUO, "std::max(near_.sinks, length + 1 - near_.recent)",
        "std::max(near_.sinks, length + 2 - near_.recent)"),
    "omnikv_duo_scores_of_streaming_heads": (
        "src/policy/omnikv/filter_scores.cc", ": attend.TakePart(),", ": HeadMask{},"),
    "a_class_takes_part_in_one_view": (
        "src/model/forward.cc", "    attend.heads = view.heads;\n", ""),
    "rows_of_a_second_class_stored_as_the_first": (
        "src/model/forward.cc", "store.rest = to[p + 1].kv;", "store.rest = to[p].kv;"),
    "rows_of_a_second_view_cost_nothing": (
        "src/backend/ops.cc", "if (a.HasRest()) heads +=", "if (false) heads +="),
    "heads_that_lie_alone_by_their_numbers": (
        CPU + "attend_kernels.cc", "const int32_t place = a.kv.Place(kv);",
        "const int32_t place = kv;"),
    "heads_of_a_prompt_that_lie_alone_by_their_numbers": (
        CPU + "prefill/attend.cc", "place_ = a_.kv.Place(kv_head);", "place_ = kv_head;"),
    "results_of_some_heads_side_by_side": (
        CPU + "attend.cc", "const int32_t head = a.Head(of_row);", "const int32_t head = of_row;"),
    "heads_that_lie_alone_by_their_numbers_on_a_card": (
        KERNELS + "attend.cu", "int32_t place = args.kv.Place(kv_head);",
        "int32_t place = kv_head;"),
    "merged_heads_side_by_side_on_a_card": (
        KERNELS + "attend_merge.cuh", "return args.Head(static_cast<int32_t>(Fresh(blockIdx.x)));",
        "return static_cast<int32_t>(Fresh(blockIdx.x));"),
    "a_second_view_is_not_stored_on_a_card": (
        KERNELS + "kept_rows.cu", "StoreIn<Word>(a.rest, {}, a, i - n_slices);", ""),
    "omnikv_duo_retrieving_heads_read_all": (
        OMNIKV_DUO, "== kStreaming ? *heads_ : *tokens_", "== kStreaming ? *heads_ : *heads_"),
    "omnikv_duo_every_head_gives_up": (
        OMNIKV_DUO, "heads_->Dropped(length, head_class)",
        "heads_->Dropped(length, std::max(head_class, kStreaming))"),
    "streaming_heads_score_on_a_card": (
        KERNELS + "select.cu", "if (!a.Takes(h)) continue;", ""),
    "copied_values_of_one_sequence": (
        "src/bank/fetched_values.cc", "q * static_cast<int32_t>(entries.size())", "0 * q"),
    "copied_values_of_one_head": ("src/bank/fetched_values.cc", ".lists = list.lists,", ""),
    "copied_values_read_where_they_were": (
        "src/bank/fetched_values.cc", "  attend.kv = here;\n", ""),
    "values_stand_behind_their_keys": (
        PLACEMENT, "plan.values_apart = ReadsByLayer(config, policy.Reads()).few_values;", ""),
    "kcache_group_reads_what_its_first_head_chose": (
        KCACHE, "Unites() ? Union(step.layer, attend) : choice_.List()", "choice_.List()"),
    "kcache_counts_are_of_the_first_layer": (
        KCACHE, "union_count_.as<int32_t>() + int64_t{layer} * context_.max_seqs * context_.n_kv_heads",
        "union_count_.as<int32_t>() + 0 * int64_t{layer}"),
    "union_leaves_out_the_last_of_a_list": (
        "src/policy/kcache/union.cc", "ListOf(a, list) + a.count[list], std::back_inserter(more)",
        "ListOf(a, list) + std::max(1, a.count[list] - 1), std::back_inserter(more)"),
    "union_on_a_card_counts_the_first_alone": (
        "src/policy/kcache/union.cu", "rank += before(first + below(list, t)) - before(first);",
        "rank += before(first + (below(list, t) > 0 ? 1 : 0)) - before(first);"),
    "kcache_renormalises_always": (KCACHE, "if (!renormalise_) attend.lse_in = weigh.lse;", ""),
    "q4_offset_of_seven": (
        CPU + "simd-inl.h", "hn::Sub(code, hn::Set(di, 8))", "hn::Sub(code, hn::Set(di, 7))"),
    "q4_scale_without_its_sign": (CPU + "rows.cc", "top = from[i + static_cast<size_t>(lane)];", ""),
    "q4_nibbles_swapped": (
        CPU + "rows.cc", "hn::Or(codes(from + i), hn::ShiftLeft<4>(codes(from + kHalf + i)))",
        "hn::Or(codes(from + kHalf + i), hn::ShiftLeft<4>(codes(from + i)))"),
    "a_row_left_over_is_summed_as_the_others": (
        CPU + "matvec.cc", "kAlone = M % kRegisterRows == 1;", "kAlone = M == 1;"),
    "second_rows_of_wide_tiles_are_the_first_ones": (
        CPU + "matvec.cc", "sums + (other - m) * R,", "sums,"),
    "tiles_of_rows_are_cut_anywhere": (
        CPU + "matvec.cc", "left <= most ? left : most / kRegisterRows * kRegisterRows;",
        "std::min(left, most);"),
    "q4_codes_rounded_down": (CPU + "rows.cc", "hn::Set(d, 8.5f)", "hn::Set(d, 8.0f)"),
    "q4_query_of_the_other_half": (
        CPU + "attend_scores-inl.h", "q + first + i * kHalf", "q + first + (1 - i) * kHalf"),
    "q4_offset_of_seven_on_a_card": (
        KERNELS + "common.cuh", "pair & 15 : pair >> 4) - 8)", "pair & 15 : pair >> 4) - 7)"),
    "q4_v_of_low_nibbles_on_a_card": (
        KERNELS + "attend.cu", "Q4Bytes(v[i] >> g / 4 * 4)", "Q4Bytes(v[i])"),
    **FAULTS_OF_DISKS, **FAULTS_OF_INDEX, **FAULTS_OF_SETS,
    **FAULTS_OF_CHOICES, **FAULTS_OF_ROWS_BY_HEAD, **FAULTS_OF_VALUES, **FAULTS_OF_ATTENTION,
}
# Name -> program, tests, seconds. In the order in which they run.
CHECKS = {
    "goldens": ("engine_test", "*Family*_cuda:*Heads*_cuda:*PolicyOracle*cuda*", 180),
    "policies": ("policy_test", "*EveryPolicy*_cuda:*TopPOn*/cuda", 120),
    "engine": (
        "engine_test",
        "*AheadTest*/cuda:*BatchTest*/cuda:*PolicySessionOn*/cuda:*SparsePromptsOn*/cuda", 180),
    "lanes": ("cuda_backend_test", "CudaDisk*:CudaEarly*", 60),
    "parity": ("parity_cuda_test", "*", 180),
}
PROGRAMS = {"engine_test": "tests/engine", "policy_test": "tests/policy",
            "cuda_backend_test": "tests/backend", "parity_cuda_test": "tests/backend"}
# Of faults that need no card: the file, its folder or the fault -> program, tests. The fault's own
# counts before those of its place, of which the last counts. What names a file, or lies in CPU, is
# not tried on the card.
ENGINE_CHECK = ("engine_test", "*PolicyOracle*cpu*:*Anchors*cpu*:*SparsePromptsOn*/cpu")
HOST_CHECKS = {"src/policy/": ENGINE_CHECK, "src/engine/": ENGINE_CHECK,
               "src/bank/": ("host_layers_test", "*/lanes"),
               CPU: ("parity_test", "*Q4Goldens*:*AttendDenseShapes*"),
               **{name: ("scheduler_test", tests) for name, tests in (
                   ("prompts_with_passes_are_read_together", "*OnEngines*cpu"),
                   ("far_places_of_a_step_are_one", "*OnEngines*cpu"),
                   ("generated_rows_are_for_everyone", "*ShareTheRows*cpu"),
                   ("preempted_scores_are_of_number_0", "*EveryPolicyIsResumed*cpu"),
                   ("preempted_choices_are_of_number_0", "*EveryPolicyIsResumed*cpu"),
                   ("equals_preempt_equals", "*Urgent*cpu"),
                   ("a_promise_is_not_kept", "*AllGrow*cpu"),
                   ("newer_prompts_go_first", "*NewerPrompts*cpu"),
                   ("samplers_do_not_know_what_the_device_drew", "SchedulerAhead.*"),
                   ("a_device_draws_for_one_row_too_few", "SchedulerAhead.*"),
                   ("the_waiting_wait_for_the_preempted", "*Pinned*cpu"))},
               "kcache_counts_are_of_the_first_layer": ("policy_test", "*kcache*"),
               "blocks_of_generated_tokens_are_never_complete": ("cost_test", "*GeneratedBlocks*"),
               READ_PICTURE: ("read_picture_test", "*/cpu"),
               "other_texts_are_the_same": ("engine_test", "*SameText*"),
               "a_respelled_prompt_has_the_tokens_of_the_other": ("service_test", "*OtherTokens*"),
               **{name: ("read_picture_test", "ReadPictures.*") for name in (
                   "requests_with_pictures_run_ahead", "steps_ahead_are_not_counted",
                   "hits_of_the_last_member_alone")},
               NAMELESS: ("io_test", "MappedFile.*"),
               **{path: ("disk_memory_test", "*") for path in (DISK, HOST_BACKEND, POSTED)},
               DISK_LAYERS: ("engine_test", "DiskOfCardTest.*"),
               "layers_of_a_disk_lie_in_memory": ("engine_test", "DiskOfCardTest.*"),
               **{path: ("host_layers_test", "*DiskBesideCard*/lanes")
                  for path in ("src/engine/asking_backend.h", "src/bank/own_rows.cc")},
               HOLDINGS: ("disk_tier_test", "*Statistics*/cpu"),
               "sessions_of_sparse_prompts_take_rows": ("context_test", "*/cpu"),
               "a_saved_context_is_not_checked": ("context_test", "*SaveTest*/cpu"),
               READING: ("context_store_test", "StoreReading*"),
               **{path: ("context_store_test", "StoreSegments*") for path in (SEGMENTS, SEGMENT_FILES, STORE)},
               KEPT: ("context_store_test", "StoreWriting*"),
               "src/io/disk_reader.cc": ("io_test", "*DiskReader*"),
               **{name: ("context_store_test", "StoreReading*") for name in (
                   "a_stored_context_is_not_checked", "a_cancelled_reading_goes_on",
                   "others_wait_for_the_store", "a_request_of_the_store_loses_its_seat",
                   "a_request_of_the_store_is_promised_nothing")},
               **{name: ("context_store_test", "*Pinned*") for name in (
                   "pinned_contexts_make_room", "pinned_files_make_room",
                   "longer_contexts_replace_pinned_files")},
               **{n: ("context_store_test", "StoreSegments*")
                  for n in ("a_segment_of_another_name_is_read", "a_context_is_cut_behind_its_damage")},
               "preempted_blocks_stay_excluded": ("policy_test", "BlocksPreselect.*"),
               "states_are_made_of_rows_on_a_disk": ("host_layers_test", "*StatesAreNotMade*/lanes"),
               "kascade_rounds_up": ("engine_test", "*PolicyOracle*_kascade_cpu*"),
               "strided_on_one_grid": ("engine_test", "*PolicyOracle*_strided_cpu*"),
               "rows_ahead_are_not_fetched": ("policy_test", "OmnikvTest.RowsThatComeAhead*"),
               REF_SETS: ("bank_test", "WorkingSet*"),
               **{name: ("bank_test", "WorkingSet*") for name in (
                   "what_was_found_often_goes_like_the_rest", "averages_are_the_last_score",
                   "slots_that_scored_high_go_first")},
               "averages_of_the_oldest_query": ("policy_test", "*SimulatedSetsMiss*omnikv*"),
               SETS: ("policy_test", "OmnikvTest.RowsThatComeAhead*"),
               LOCATE: ("parity_test", "*OverStreams*"),
               "src/bank/kept_rows.cc": ("policy_test", "PyramidKv.*:HeadsApart.*"),
               "src/model/forward.cc": ("policy_test", "HeadsApart.*"),
               **{f"src/bank/{f}.cc": ("bank_test", "StreamsTest.*") for f in ("bank", "bank_config", "bank_image")},
               "pieces_begin_where_their_run_began": ("context_store_test", "StoreReading*:StoreWriting*"),
               "what_waits_to_be_written_goes_with_the_scheduler": ("context_store_test", "StoreWriting*"),
               "src/policy/kvzip/head_rows.cc": ("kvzip_test", "*KvzipTest*/cpu"),
               **{name: ("kvzip_test", "*LaterTurns*/cpu") for name in (
                   "kvzip_spares_the_first_tokens_of_every_turn",
                   "kvzip_repeats_the_whole_context_in_every_turn",
                   "kvzip_later_chunks_begin_where_heads_keep_nothing",
                   "kvzip_later_chunks_accumulate_over_layers",
                   "kvzip_passes_see_the_chunks_before")},
               "src/policy/block_rule.h": ("policy_test", "Blocks*"),
               PLACEMENT: ("engine_test", "PlacementTest*"),
               "units_of_a_disk_are_attended_to_there": ("disk_tier_test", "*ChangesNothing/cpu"),
               **{name: ("engine_test", "DiskPlacementTest.*") for name in (
                   "the_room_of_a_disk_is_not_checked", "layers_leave_memory_that_has_room")},
               **{path: ("held_memory_test", "*Reserved*streaming_cpu:*AtThePeak*_cpu")
                  for path in (BANK_CONFIG, PROMPT_STAGE, STREAMING)},
               CPU + "matvec.cc": ("cpu_backend_test", "*RowsOfProducts*"),
               MEMORY: ("held_memory_test", "*OfTheProcess*/full_cpu"),
               "a_stage_does_not_await_another_sequence": (
                   "host_layers_test", "*ChangeNothing/lanes"),
               "sets_are_primed_from_places_of_the_bank": (
                   "host_layers_test", "*ChangeNothing/lanes"),
               "rows_stand_in_a_stage_as_in_the_bank": ("bank_test", "BankTest.*"),
               "stages_have_room_for_all_sequences": ("bank_test", "BankTest.*"),
               "heads_apart_have_the_blocks_of_one": ("bank_test", "StreamsTest.*"),
               **{name: ("parity_test", "*HeadsThatLieAlone*")
                  for name in ("heads_that_lie_alone_by_their_numbers",
                               "heads_of_a_prompt_that_lie_alone_by_their_numbers",
                               "results_of_some_heads_side_by_side")},
               **CHECKS_OF_ROWS_BY_HEAD, **CHECKS_OF_VALUES, **CHECKS_OF_ATTENTION,
               **CHECKS_OF_INDEX, **CHECKS_OF_CHOICES,
               "src/backend/ops.cc": ("fusion_test", "CostOfOps.*"),
               **{f"a_unit_is_complete_{when}": ("parity_test", "CompletedUnits.*")
                  for when in ("one_token_late", "when_it_begins")},
               "a_class_takes_part_in_one_view": ("engine_test", "HeadClasses.HeadsOfAClass*"),
               **{name: ("engine_test", "*PromptsByLayer.Answer*/cpu:*PromptsByLayer.Four*/cpu")
                  for name in ("parked_rows_do_not_come_back",
                               "passes_by_layer_share_their_residual",
                               "a_prompt_by_layer_has_room_for_all_its_rows",
                               "windows_stand_between_the_tables_of_heads",
                               "heads_apart_by_layer_have_room_for_what_the_first_keeps")},
               **{name: ("engine_test", "*PromptsByLayer.*Windows*/cpu") for name in (
                   "passes_push_the_prompt_out_of_windows", "passes_stay_in_windows")},
               "heads_apart_have_no_room_for_a_prompt": ("bank_test", "StreamsTest.*"),
               "layers_of_heads_apart_have_the_positions_of_the_first": (
                   "engine_test", "*PolicyOracleOnItsEngine*kvzip*cpu*"),
               **{f"heads_apart_have_{name}": ("kvzip_test", "*ShareTheRoom*/cpu")
                  for name in ("no_room_for_later_turns", "room_for_any_turn")},
               "heads_apart_are_as_long_as_the_first": ("policy_test", "HeadsApart.*"),
               "duo_drops_one_too_many": ("policy_test", "*EveryPolicy.DroppedTokens*_cpu"),
               "knorm_of_the_next_sequence": ("engine_test", "*BatchTest*/cpu"),
               **{path: ("cost_test", "*") for path in (COST, COMBINATIONS, COMPOSITIONS)}}
