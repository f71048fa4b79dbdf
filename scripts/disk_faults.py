"""Faults of K/V on a disk, for mutants.py: the form is that of faults.py."""

NAMELESS, DISK = "src/io/nameless_file.cc", "src/backend/disk_memory.cc"
HOST_BACKEND, HOLDINGS = "src/backend/host_backend.cc", "src/engine/holdings.cc"
PLACEMENT, PLAN_BANK = "src/engine/placement.cc", "src/engine/plan_bank.cc"
DISK_LAYERS, POSTED = "src/engine/disk_layers.cc", "src/backend/posted_jobs.cc"
DISK_LANE = "src/backend/cuda/disk_lane.cc"
FAULTS_OF_DISKS = {
    "files_of_the_disk_have_holes": (
        NAMELESS, "posix_fallocate(mapped.file_, 0, static_cast<off_t>(bytes))",
        "ftruncate(mapped.file_, static_cast<off_t>(bytes))"),
    "all_rows_of_a_fetch_are_neighbours": (
        DISK, "pieces[i].from == pieces[i - 1].from + pieces[i - 1].bytes;", "true;"),
    "reads_of_a_disk_are_not_awaited": (
        DISK, "done_.wait(lock, [&] { return job->Done(); });", ""),
    "copies_from_a_disk_overtake": (
        DISK, "in_order_.push_back(job);", "in_order_.push_front(job);"),
    "a_lane_does_not_await_the_disk": (
        HOST_BACKEND, "if (disk_ != nullptr && for_ == Lane::kIn && waits != for_)",
        "if (disk_ != nullptr && for_ == Lane::kOut && waits != for_)"),
    "signals_of_a_disk_are_reached_at_once": (
        HOST_BACKEND, "lane == Lane::kIn ? disk_->begun() : 0",
        "lane == Lane::kOut ? disk_->begun() : 0"),
    "units_of_a_disk_are_attended_to_there": (
        PLACEMENT, "chooses && plan.on_disk && reads.HeldByUnit()", "false"),
    "the_room_of_a_disk_is_not_checked": (
        PLACEMENT, "if (to_disk ? p.OnDisk() <= disk_->bytes :", "if (to_disk ? true :"),
    "layers_leave_memory_that_has_room": (
        PLACEMENT, "|| options_.place == \"disk\";\n    plan_.context", "|| plan_.on_disk;\n    plan_.context"),
    "kv_on_a_disk_count_as_memory": (
        HOLDINGS, ".disk = on_disk}", ".disk = on_disk / 2}"),
    "more_layers_than_necessary_go_to_the_disk": (
        DISK_LAYERS, "size_t n = all ?", "size_t n = all || host > 0 ?"),
    "the_way_from_a_disk_takes_no_memory": (
        DISK_LAYERS, "plan.disk_way = n > 0 ? way : 0;", "plan.disk_way = n > 0 ? way / 2 : 0;"),
    "the_first_layers_go_to_the_disk": (
        DISK_LAYERS, "for (size_t i = may_go.size() - n; i < may_go.size(); ++i)",
        "for (size_t i = 0; i < n; ++i)"),
    "a_card_reads_a_disk_in_place": (
        "src/engine/asking_backend.h", "OnDevice() && UsesInPlace(op, on_disk)",
        "on_disk_.empty() && UsesInPlace(op, on_disk)"),
    "rows_of_a_step_stay_away_from_the_disk": (
        "src/bank/own_rows.cc", "slots_.SendHome(0,", "if (layer > rows_.size()) slots_.SendHome(0,"),
    "a_step_sends_the_row_before_to_the_disk": (
        "src/bank/own_rows.cc", "backend_.Join(Lane::kOut, Lane::kMain);", ""),
    "layers_of_a_disk_lie_in_memory": (
        PLAN_BANK, "stream.on_disk = stream.tier == TierKind::kHost;", "stream.on_disk = false;"),
    "rows_of_a_disk_are_not_awaited": (
        DISK_LANE, "  reads_->Await(launch);\n", ""),
    "writes_to_a_disk_are_not_awaited": (
        DISK_LANE, "if (std::exchange(next_way_out_, 0) > 0) copies_out_->Await(launch);",
        "next_way_out_ = 0;"),
    "parts_from_a_disk_share_a_way": (
        DISK_LANE, "return ways_in_[i % 2]", "return ways_in_[i / 2 % 1]"),
    "rows_to_a_disk_go_where_they_came_from": (
        DISK_LANE, "here.to_row = RowsInOrder(rows);", ""),
    "jobs_run_before_their_posts": (
        POSTED, "if (!AwaitPost(number)) return;", ""),
    "jobs_are_counted_before_they_ran": (
        POSTED, "    job();\n    counts_.done.store(number, std::memory_order_release);",
        "    counts_.done.store(number, std::memory_order_release);\n    job();"),
    "states_are_made_of_rows_on_a_disk": (
        "src/engine/kept_contexts.cc", "return reaches ||", "return true || reaches ||"),
}
