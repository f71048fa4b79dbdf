/* The C API on the shipped model, on the CPU: capi_test FOLDER_FOR_FILES. */
#define _POSIX_C_SOURCE 200809L
#include <omnikv/c_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int failures = 0;
static const char* test_name = "";

static void Expect(int holds, const char* what, int line) {
  if (holds) return;
  ++failures;
  printf("capi_test.c:%d: %s: %s (last error: %s)\n", line, test_name, what, omnikv_last_error());
}
#define EXPECT(condition) Expect((condition) != 0, #condition, __LINE__)
#define EXPECT_OK(call) Expect((call) == OMNIKV_OK, #call " is ok", __LINE__)

/* A call that fails with a code and a sentence. */
static void Refused(omnikv_status got, omnikv_status code, const char* part, int line) {
  if (got == code && strstr(omnikv_last_error(), part) != NULL) return;
  ++failures;
  printf("capi_test.c:%d: %s: status %d, expected %d; '%s' has no '%s'\n", line, test_name,
         (int)got, (int)code, omnikv_last_error(), part);
}
#define EXPECT_REFUSED(call, code, part) Refused((call), (code), (part), __LINE__)

static const char* const kModel = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf";
static const char* const kQuestion = "The pass key is 48213. What is the pass key?";
static const char* const kAnswer = "The pass key is 48213.";
static const char* folder = ".";

/* Options of name, value, name, ..., NULL. */
static omnikv_options* Options(const char* const* pairs) {
  omnikv_options* options = NULL;
  EXPECT_OK(omnikv_options_new(&options));
  for (; *pairs != NULL; pairs += 2) EXPECT_OK(omnikv_options_set(options, pairs[0], pairs[1]));
  return options;
}
#define OPTIONS(...) Options((const char* const[]){__VA_ARGS__, NULL})

static omnikv_engine* Load(const char* sessions) {
  omnikv_options* options = OPTIONS("model", kModel, "device", "cpu", "threads", "2", "context",
                                    "4k", "max_sessions", sessions);
  omnikv_engine* engine = NULL;
  EXPECT_OK(omnikv_engine_load(options, NULL, NULL, &engine));
  omnikv_options_free(options);
  if (engine == NULL) exit(1);
  return engine;
}

static omnikv_session* NewSession(omnikv_engine* engine) {
  omnikv_session* session = NULL;
  EXPECT_OK(omnikv_session_new(engine, NULL, &session));
  if (session == NULL) exit(1);
  return session;
}

static int32_t* Ask(omnikv_engine* engine, const char* question, size_t* n) {
  const char* const role = "user";
  int32_t* tokens = NULL;
  EXPECT_OK(omnikv_engine_chat_prompt(engine, &role, &question, 1, &tokens, n));
  return tokens;
}

static void ReadPrompt(omnikv_engine* engine, omnikv_session* session, const char* question) {
  size_t n = 0;
  int32_t* tokens = Ask(engine, question, &n);
  EXPECT_OK(omnikv_session_prompt(session, tokens, n, NULL, NULL));
  omnikv_free(tokens);
}

typedef struct Told {
  char text[8192];
  size_t bytes;
  int pieces, ends;
  int stop_after; /* pieces; 0: never */
  omnikv_status status;
  omnikv_finish finish;
  char error[512];
  char stats[1024];
} Told;

static int OnText(void* user, const char* text, size_t bytes) {
  Told* told = user;
  EXPECT(strlen(text) == bytes);
  if (told->bytes + bytes < sizeof told->text) {
    memcpy(told->text + told->bytes, text, bytes + 1);
    told->bytes += bytes;
  }
  return ++told->pieces == told->stop_after;
}

static int OnPiece(void* user, int32_t token, const char* text, size_t bytes) {
  EXPECT(token >= -1);
  return OnText(user, text, bytes);
}

static void OnEnd(void* user, omnikv_status status, const char* error, omnikv_finish finish,
                  const char* stats_json) {
  Told* told = user;
  ++told->ends;
  told->status = status;
  told->finish = finish;
  snprintf(told->error, sizeof told->error, "%s", error);
  snprintf(told->stats, sizeof told->stats, "%s", stats_json);
}

/* All that next gives. */
static omnikv_finish Pull(omnikv_session* session, Told* told) {
  const char* text = NULL;
  size_t bytes = 0;
  int32_t token = 0;
  omnikv_status status = OMNIKV_OK;
  omnikv_finish finish = OMNIKV_FINISH_NONE;
  while ((status = omnikv_session_next(session, &token, &text, &bytes)) == OMNIKV_OK) {
    if (OnPiece(told, token, text, bytes) != 0) omnikv_session_cancel(session);
  }
  EXPECT(status == OMNIKV_END);
  EXPECT(omnikv_session_next(session, &token, &text, &bytes) == OMNIKV_END);
  EXPECT_OK(omnikv_session_finish(session, &finish));
  return finish;
}

static omnikv_finish Drain(omnikv_stream* stream, Told* told) {
  const char* text = NULL;
  size_t bytes = 0;
  omnikv_finish finish = OMNIKV_FINISH_NONE;
  while ((told->status = omnikv_stream_next(stream, -1, NULL, &text, &bytes)) == OMNIKV_OK) {
    if (OnText(told, text, bytes) != 0) omnikv_stream_cancel(stream);
  }
  EXPECT_OK(omnikv_stream_finish(stream, &finish));
  return finish;
}

static void Has(const char* json, const char* part, int line) {
  if (json != NULL && strstr(json, part) != NULL) return;
  ++failures;
  printf("capi_test.c:%d: %s: %s has no %s\n", line, test_name, json == NULL ? "NULL" : json, part);
}
#define EXPECT_HAS(json, part) Has((json), (part), __LINE__)

static void Library(omnikv_engine* engine) {
  char* text = NULL;
  int32_t* tokens = NULL;
  size_t n = 0;
  size_t bytes = 0;
  EXPECT(omnikv_c_api_version() == OMNIKV_C_API_VERSION);
  EXPECT(strcmp(omnikv_version(), "0.1.0") == 0);
  EXPECT(omnikv_engine_context(engine) == 4096);
  EXPECT(omnikv_engine_vocab(engine) > 1000);
  EXPECT(strlen(omnikv_engine_device(engine)) > 0);
  EXPECT_OK(omnikv_engine_info(engine, &text));
  EXPECT_HAS(text, "\"context\":4096");
  omnikv_free(text);
  EXPECT_OK(omnikv_engine_tokenize(engine, kQuestion, strlen(kQuestion), 0, 0, &tokens, &n));
  EXPECT(n > 5);
  EXPECT_OK(omnikv_engine_detokenize(engine, tokens, n, &text, &bytes));
  EXPECT(strcmp(text, kQuestion) == 0 && bytes == strlen(kQuestion));
  omnikv_free(text);
  omnikv_free(tokens);
  EXPECT_OK(omnikv_engine_tokenize(engine, NULL, 0, 0, 0, &tokens, &n));
  EXPECT(n == 0 && tokens != NULL);
  omnikv_free(tokens);
}

static void Mistakes(omnikv_engine* engine) {
  omnikv_options* options = NULL;
  omnikv_engine* none = NULL;
  omnikv_session* session = NULL;
  omnikv_session* refused = NULL;
  int32_t* tokens = NULL;
  const char* text = NULL;
  const float* logits = NULL;
  char* json = NULL;
  size_t n = 0;
  const int32_t bad = -5;

  EXPECT_REFUSED(omnikv_engine_load(NULL, NULL, NULL, &none), OMNIKV_INVALID_ARGUMENT, "`model`");
  EXPECT_REFUSED(omnikv_engine_load(NULL, NULL, NULL, NULL), OMNIKV_INVALID_ARGUMENT, "is NULL");
  options = OPTIONS("model", "/nonexistent.gguf");
  EXPECT_REFUSED(omnikv_engine_load(options, NULL, NULL, &none), OMNIKV_NOT_FOUND,
                 "/nonexistent.gguf");
  EXPECT(none == NULL);
  EXPECT_REFUSED(omnikv_options_set(options, "contxt", "5"), OMNIKV_INVALID_ARGUMENT, "'contxt'");
  EXPECT_REFUSED(omnikv_options_set(options, "model", NULL), OMNIKV_INVALID_ARGUMENT, "is NULL");
  EXPECT_REFUSED(omnikv_options_set(options, "model", "\xff"), OMNIKV_INVALID_ARGUMENT, "UTF-8");
  EXPECT_REFUSED(omnikv_options_set(NULL, "model", "x"), OMNIKV_INVALID_ARGUMENT, "is NULL");
  EXPECT_OK(omnikv_options_set(options, "context", "many"));
  EXPECT_REFUSED(omnikv_engine_load(options, NULL, NULL, &none), OMNIKV_INVALID_ARGUMENT,
                 "`context` is 'many', expected a whole number");
  EXPECT_OK(omnikv_options_set(options, "context", "64")); /* the later one counts */
  EXPECT_OK(omnikv_options_set(options, "threads", "9999999999"));
  EXPECT_REFUSED(omnikv_engine_load(options, NULL, NULL, &none), OMNIKV_INVALID_ARGUMENT,
                 "`threads`");
  omnikv_options_free(options);
  options = OPTIONS("model", kModel, "temperature", "1");
  EXPECT_REFUSED(omnikv_engine_load(options, NULL, NULL, &none), OMNIKV_INVALID_ARGUMENT,
                 "'temperature' is no option of an engine");
  omnikv_options_free(options);
  options = OPTIONS("model", kModel, "device", "abacus");
  EXPECT_REFUSED(omnikv_engine_load(options, NULL, NULL, &none), OMNIKV_INVALID_ARGUMENT, "abacus");
  omnikv_options_free(options);

  options = OPTIONS("policy", "nonesuch");
  EXPECT_REFUSED(omnikv_session_new(engine, options, &refused), OMNIKV_INVALID_ARGUMENT,
                 "nonesuch");
  omnikv_options_free(options);
  options = OPTIONS("policy", "streaming", "policy.budget", "few");
  EXPECT_REFUSED(omnikv_session_new(engine, options, &refused), OMNIKV_INVALID_ARGUMENT, "few");
  omnikv_options_free(options);
  options = OPTIONS("policy", "streaming", "policy.nonesuch", "1");
  EXPECT_REFUSED(omnikv_session_new(engine, options, &refused), OMNIKV_INVALID_ARGUMENT,
                 "nonesuch");
  omnikv_options_free(options);
  EXPECT(refused == NULL);
  EXPECT_REFUSED(omnikv_session_new(NULL, NULL, &refused), OMNIKV_INVALID_ARGUMENT, "is NULL");

  session = NewSession(engine);
  EXPECT_REFUSED(omnikv_session_generate(session, NULL, NULL, NULL, NULL, NULL, NULL),
                 OMNIKV_INVALID_ARGUMENT, "no prompt");
  EXPECT_REFUSED(omnikv_session_begin(session, NULL), OMNIKV_INVALID_ARGUMENT, "no prompt");
  EXPECT_REFUSED(omnikv_session_next(session, NULL, &text, &n), OMNIKV_INVALID_ARGUMENT, "begun");
  EXPECT_REFUSED(omnikv_session_logits(session, &logits, &n), OMNIKV_INVALID_ARGUMENT, "logits");
  EXPECT_REFUSED(omnikv_session_prompt(session, NULL, 3, NULL, NULL), OMNIKV_INVALID_ARGUMENT,
                 "is NULL");
  EXPECT_REFUSED(omnikv_session_prompt(session, &bad, 1, NULL, NULL), OMNIKV_INVALID_ARGUMENT,
                 "-5");
  EXPECT_REFUSED(omnikv_session_step(session, bad), OMNIKV_INVALID_ARGUMENT, "-5");
  tokens = calloc(5000, sizeof *tokens);
  EXPECT_REFUSED(omnikv_session_prompt(session, tokens, 5000, NULL, NULL), OMNIKV_INVALID_ARGUMENT,
                 "5000");
  free(tokens);
  ReadPrompt(engine, session, kQuestion);
  options = OPTIONS("temperature", "-1");
  EXPECT_REFUSED(omnikv_session_generate(session, options, NULL, NULL, NULL, NULL, NULL),
                 OMNIKV_INVALID_ARGUMENT, "`temperature` is -1");
  EXPECT_REFUSED(omnikv_session_begin(session, options), OMNIKV_INVALID_ARGUMENT,
                 "`temperature` is -1");
  omnikv_options_free(options);
  options = OPTIONS("logit_bias", "7:3");
  EXPECT_REFUSED(omnikv_session_begin(session, options), OMNIKV_INVALID_ARGUMENT, "TOKEN=BIAS");
  omnikv_options_free(options);
  EXPECT_REFUSED(omnikv_session_save(session, "/nonexistent/x"), OMNIKV_NOT_FOUND, "/nonexistent");
  EXPECT_REFUSED(omnikv_session_restore(engine, "/nonexistent/x", &refused), OMNIKV_NOT_FOUND,
                 "/nonexistent");
  EXPECT(refused == NULL);

  EXPECT_REFUSED(omnikv_session_prompt(NULL, NULL, 0, NULL, NULL), OMNIKV_INVALID_ARGUMENT, "NULL");
  EXPECT_REFUSED(omnikv_session_stats(NULL, &json), OMNIKV_INVALID_ARGUMENT, "NULL");
  EXPECT_REFUSED(omnikv_session_fork(NULL, NULL, &refused), OMNIKV_INVALID_ARGUMENT, "NULL");
  EXPECT_REFUSED(omnikv_batch_stats(NULL, &json), OMNIKV_INVALID_ARGUMENT, "NULL");
  EXPECT_REFUSED(omnikv_stream_next(NULL, 0, NULL, &text, &n), OMNIKV_INVALID_ARGUMENT, "NULL");
  EXPECT_REFUSED(omnikv_engine_tokenize(engine, "\xc3(", 2, 0, 0, &tokens, &n),
                 OMNIKV_INVALID_ARGUMENT, "UTF-8");
  EXPECT_REFUSED(omnikv_engine_chat_prompt(engine, NULL, NULL, 0, &tokens, &n),
                 OMNIKV_INVALID_ARGUMENT, "no messages");
  EXPECT_REFUSED(omnikv_set_log_level(3), OMNIKV_INVALID_ARGUMENT, "0 to 2");
  EXPECT(omnikv_engine_context(NULL) == 0 && omnikv_engine_vocab(NULL) == 0);
  omnikv_session_free(session);
  omnikv_session_cancel(NULL);
  omnikv_stream_cancel(NULL);
  omnikv_session_free(NULL);
  omnikv_engine_free(NULL);
  omnikv_batch_free(NULL);
  omnikv_stream_free(NULL);
  omnikv_options_free(NULL);
}

static int Progress(void* user, int64_t done, int64_t total) {
  EXPECT(done <= total);
  *(int64_t*)user = total;
  return 0;
}

typedef struct Nested {
  omnikv_session* session;
  omnikv_status inner;
} Nested;

static int CallsItsSession(void* user, const char* text, size_t bytes) {
  Nested* nested = user;
  (void)text;
  (void)bytes;
  nested->inner = omnikv_session_step(nested->session, 5);
  omnikv_session_cancel(nested->session);
  return 0;
}

static void Answers(omnikv_engine* engine) {
  omnikv_session* session = NewSession(engine);
  omnikv_finish finish = OMNIKV_FINISH_NONE;
  Told told = {0};
  Nested nested = {0};
  char* text = NULL;
  char* json = NULL;
  size_t n = 0;
  size_t bytes = 0;
  int64_t total = 0;
  int32_t* tokens = Ask(engine, kQuestion, &n);
  EXPECT_OK(omnikv_session_prompt(session, tokens, n, Progress, &total));
  EXPECT(total == (int64_t)n);
  EXPECT_OK(omnikv_session_generate(session, NULL, OnText, &told, &text, &bytes, &finish));
  EXPECT(strcmp(text, kAnswer) == 0 && strcmp(told.text, kAnswer) == 0);
  EXPECT(bytes == strlen(kAnswer) && finish == OMNIKV_FINISH_STOP);
  omnikv_free(text);
  EXPECT_OK(omnikv_session_stats(session, &json));
  EXPECT_HAS(json, "\"policy\":\"");
  EXPECT_HAS(json, "\"hit_rate\":null");
  omnikv_free(json);

  /* A callback ends it, and can make no other call. */
  EXPECT_OK(omnikv_session_prompt(session, tokens, n, NULL, NULL));
  memset(&told, 0, sizeof told);
  told.stop_after = 1;
  EXPECT_OK(omnikv_session_generate(session, NULL, OnText, &told, NULL, NULL, &finish));
  EXPECT(told.pieces == 1 && finish == OMNIKV_FINISH_CANCELLED);
  EXPECT_OK(omnikv_session_prompt(session, tokens, n, NULL, NULL));
  nested.session = session;
  EXPECT_OK(omnikv_session_generate(session, NULL, CallsItsSession, &nested, NULL, NULL, &finish));
  EXPECT(nested.inner == OMNIKV_INVALID_ARGUMENT && finish == OMNIKV_FINISH_CANCELLED);
  omnikv_free(tokens);
  omnikv_session_free(session);
}

/* Pieces that are asked for are those of generate. */
static void Pieces(omnikv_engine* engine, omnikv_options* options) {
  omnikv_session* session = NewSession(engine);
  omnikv_finish finish = OMNIKV_FINISH_NONE;
  omnikv_finish pulled = OMNIKV_FINISH_NONE;
  Told told = {0};
  char* text = NULL;
  char* json = NULL;
  char* rest = NULL;
  ReadPrompt(engine, session, kQuestion);
  EXPECT_OK(omnikv_session_generate(session, options, NULL, NULL, &text, NULL, &finish));
  EXPECT_OK(omnikv_session_generate(session, options, NULL, NULL, &rest, NULL, NULL));
  omnikv_session_free(session);
  session = NewSession(engine);
  ReadPrompt(engine, session, kQuestion);
  EXPECT_OK(omnikv_session_begin(session, options));
  pulled = Pull(session, &told);
  EXPECT(strcmp(told.text, text) == 0);
  EXPECT(pulled == finish);
  if (pulled != finish || strcmp(told.text, text) != 0) {
    printf("  generate: %d '%s'\n  next:     %d '%s'\n", (int)finish, text, (int)pulled, told.text);
  }
  EXPECT_OK(omnikv_session_stats(session, &json));
  EXPECT_HAS(json, "\"decode_tokens\":");
  omnikv_free(json);
  /* And it goes on as that does. */
  memset(&told, 0, sizeof told);
  EXPECT_OK(omnikv_session_begin(session, options));
  Pull(session, &told);
  EXPECT(strcmp(told.text, rest) == 0);
  omnikv_free(text);
  omnikv_free(rest);
  omnikv_session_free(session);
}

static void AllPieces(omnikv_engine* engine) {
  omnikv_options* options = OPTIONS("max_tokens", "32");
  Pieces(engine, options);
  omnikv_options_free(options);
  options = OPTIONS("max_tokens", "24", "temperature", "1.5", "seed", "7", "ignore_eos", "1");
  Pieces(engine, options);
  omnikv_options_free(options);
  options = OPTIONS("max_tokens", "24", "stop", "key is", "stop", "zzz");
  Pieces(engine, options);
  omnikv_options_free(options);
  options = OPTIONS("max_tokens", "24", "presence_penalty", "1.5", "frequency_penalty", "0.5",
                    "ignore_eos", "true", "logit_bias", "42=-5", "repeat_penalty", "1.1");
  Pieces(engine, options);
  omnikv_options_free(options);
  options = OPTIONS("max_tokens", "0");
  Pieces(engine, options);
  omnikv_options_free(options);
}

static void StepsAndForks(omnikv_engine* engine) {
  omnikv_session* session = NewSession(engine);
  omnikv_session* fork = NULL;
  omnikv_options* streaming =
      OPTIONS("policy", "streaming", "policy.sinks", "4", "policy.budget", "64");
  const float* logits = NULL;
  const float* of_fork = NULL;
  char* text = NULL;
  char* json = NULL;
  int32_t* tokens = NULL;
  size_t vocab = 0;
  size_t n = 0;
  size_t before = 0;
  ReadPrompt(engine, session, kQuestion);
  EXPECT_OK(omnikv_session_tokens(session, &tokens, &before));
  omnikv_free(tokens);
  EXPECT_OK(omnikv_session_fork(session, NULL, &fork));
  /* A greedy answer by hand. */
  for (int i = 0; i < 4; ++i) {
    EXPECT_OK(omnikv_session_logits(session, &logits, &vocab));
    EXPECT(vocab == (size_t)omnikv_engine_vocab(engine));
    size_t best = 0;
    for (size_t t = 1; t < vocab; ++t) best = logits[t] > logits[best] ? t : best;
    EXPECT_OK(omnikv_session_step(session, (int32_t)best));
  }
  EXPECT_OK(omnikv_session_tokens(session, &tokens, &n));
  EXPECT(n == before + 4);
  EXPECT_OK(omnikv_engine_detokenize(engine, tokens + before, 4, &text, NULL));
  EXPECT(strncmp(text, kAnswer, strlen(text)) == 0 && strlen(text) > 3);
  omnikv_free(text);
  omnikv_free(tokens);
  /* The fork is where its session was. */
  EXPECT_OK(omnikv_session_generate(fork, NULL, NULL, NULL, &text, NULL, NULL));
  EXPECT(strcmp(text, kAnswer) == 0);
  omnikv_free(text);
  omnikv_session_free(fork);
  EXPECT_OK(omnikv_session_fork(session, streaming, &fork));
  EXPECT_OK(omnikv_session_logits(fork, &of_fork, &vocab));
  EXPECT_OK(omnikv_session_stats(fork, &json));
  EXPECT_HAS(json, "\"policy\":\"streaming\"");
  omnikv_free(json);
  omnikv_options_free(streaming);
  omnikv_session_free(fork);
  omnikv_session_free(session);
}

static void Files(omnikv_engine* engine) {
  char path[1024];
  omnikv_session* session = NewSession(engine);
  omnikv_session* restored = NULL;
  char* text = NULL;
  FILE* file = NULL;
  snprintf(path, sizeof path, "%s/capi_test.%ld", folder, (long)getpid());
  ReadPrompt(engine, session, kQuestion);
  EXPECT_OK(omnikv_session_save(session, path));
  omnikv_session_free(session);
  EXPECT_OK(omnikv_session_restore(engine, path, &restored));
  EXPECT_OK(omnikv_session_generate(restored, NULL, NULL, NULL, &text, NULL, NULL));
  EXPECT(strcmp(text, kAnswer) == 0);
  omnikv_free(text);
  omnikv_session_free(restored);
  file = fopen(path, "r+b");
  EXPECT(file != NULL && fseek(file, 2000, SEEK_SET) == 0 && fputs("damage", file) >= 0);
  if (file != NULL) fclose(file);
  EXPECT_REFUSED(omnikv_session_restore(engine, path, &restored), OMNIKV_CORRUPT, path);
  EXPECT(restored == NULL);
  remove(path);
}

static void* CancelsOnceItRuns(void* argument) {
  Nested* shared = argument;
  const struct timespec wait = {0, 30 * 1000 * 1000};
  nanosleep(&wait, NULL);
  omnikv_session_cancel(shared->session);
  return NULL;
}

static void CancelledByAnother(omnikv_engine* engine) {
  omnikv_session* session = NewSession(engine);
  omnikv_options* endless = OPTIONS("max_tokens", "1000000", "ignore_eos", "1");
  omnikv_finish finish = OMNIKV_FINISH_NONE;
  Nested shared = {0};
  Told told = {0};
  pthread_t thread;
  int32_t* tokens = NULL;
  size_t n = 0;
  shared.session = session;
  for (int pull = 0; pull < 2; ++pull) {
    ReadPrompt(engine, session, kQuestion);
    EXPECT(pthread_create(&thread, NULL, CancelsOnceItRuns, &shared) == 0);
    if (pull) {
      EXPECT_OK(omnikv_session_begin(session, endless));
      finish = Pull(session, &told);
    } else {
      EXPECT_OK(omnikv_session_generate(session, endless, NULL, NULL, NULL, NULL, &finish));
    }
    EXPECT(finish == OMNIKV_FINISH_CANCELLED);
    pthread_join(thread, NULL);
  }
  /* One that is cancelled before it begins; a prompt begins anew. */
  ReadPrompt(engine, session, kQuestion);
  omnikv_session_cancel(session);
  memset(&told, 0, sizeof told);
  EXPECT_OK(omnikv_session_begin(session, NULL));
  EXPECT(Pull(session, &told) == OMNIKV_FINISH_CANCELLED && told.pieces == 0);
  ReadPrompt(engine, session, kQuestion);
  EXPECT_OK(omnikv_session_begin(session, NULL));
  EXPECT(Pull(session, &told) == OMNIKV_FINISH_STOP && strcmp(told.text, kAnswer) == 0);
  /* A prompt. */
  tokens = malloc(4000 * sizeof *tokens);
  for (n = 0; n < 4000; ++n) tokens[n] = (int32_t)(n % 100 + 300);
  EXPECT(pthread_create(&thread, NULL, CancelsOnceItRuns, &shared) == 0);
  EXPECT_REFUSED(omnikv_session_prompt(session, tokens, n, NULL, NULL), OMNIKV_CANCELLED,
                 "cancelled");
  pthread_join(thread, NULL);
  free(tokens);
  omnikv_options_free(endless);
  omnikv_session_free(session);
}

/* Two threads with a session each: their calls take turns. */
static void* AsksAlone(void* argument) {
  omnikv_engine* engine = argument;
  omnikv_session* session = NewSession(engine);
  Told* told = calloc(1, sizeof *told);
  ReadPrompt(engine, session, kQuestion);
  EXPECT_OK(omnikv_session_begin(session, NULL));
  EXPECT(Pull(session, told) == OMNIKV_FINISH_STOP && strcmp(told->text, kAnswer) == 0);
  free(told);
  omnikv_session_free(session);
  return NULL;
}

static void Threads(omnikv_engine* engine) {
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) EXPECT(pthread_create(&threads[i], NULL, AsksAlone, engine) == 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
}

typedef struct Stopper {
  omnikv_batch* batch;
  omnikv_status stopped;
  int ended;
} Stopper;

static void StopsItsBatch(void* user, omnikv_status status, const char* error, omnikv_finish finish,
                          const char* stats_json) {
  Stopper* stopper = user;
  (void)status, (void)error, (void)finish, (void)stats_json;
  stopper->stopped = omnikv_batch_stop(stopper->batch, 0);
  stopper->ended = 1;
}

static void Batches(omnikv_engine* engine) {
  omnikv_session* session = NewSession(engine);
  omnikv_session* refused = NULL;
  omnikv_batch* batch = NULL;
  omnikv_batch* second = NULL;
  omnikv_stream* stream = NULL;
  omnikv_stream* endless_stream = NULL;
  omnikv_options* seats = OPTIONS("seats", "9");
  omnikv_options* endless = OPTIONS("max_tokens", "1000000", "ignore_eos", "1");
  omnikv_options* bad_policy = OPTIONS("policy", "nonesuch");
  omnikv_options* hurried =
      OPTIONS("max_tokens", "1000000", "ignore_eos", "1", "timeout_seconds", "0.01");
  static Told told[4];
  Told* pulled = calloc(1, sizeof *pulled);
  Stopper stopper = {0};
  const char* text = NULL;
  char* json = NULL;
  size_t n = 0;
  size_t bytes = 0;
  uint64_t id = 0;
  int32_t* tokens = Ask(engine, kQuestion, &n);

  EXPECT_REFUSED(omnikv_batch_new(engine, NULL, &batch), OMNIKV_INVALID_ARGUMENT,
                 "1 open sessions");
  omnikv_session_free(session);
  EXPECT_REFUSED(omnikv_batch_new(engine, seats, &batch), OMNIKV_INVALID_ARGUMENT,
                 "`seats` is 9, expected 1 to 3");
  EXPECT_OK(omnikv_batch_new(engine, NULL, &batch));
  EXPECT_REFUSED(omnikv_batch_new(engine, NULL, &second), OMNIKV_INVALID_ARGUMENT, "batch");
  EXPECT_REFUSED(omnikv_session_new(engine, NULL, &refused), OMNIKV_INVALID_ARGUMENT, "batch");

  memset(told, 0, sizeof told);
  for (int i = 0; i < 3; ++i) {
    EXPECT_OK(omnikv_batch_submit(batch, tokens, n, NULL, OnPiece, OnEnd, &told[i], &id));
  }
  told[3].stop_after = 2;
  EXPECT_OK(omnikv_batch_submit(batch, tokens, n, endless, OnPiece, OnEnd, &told[3], NULL));
  EXPECT_OK(omnikv_batch_stream(batch, tokens, n, NULL, &stream));
  EXPECT(Drain(stream, pulled) == OMNIKV_FINISH_STOP && pulled->status == OMNIKV_END);
  EXPECT(strcmp(pulled->text, kAnswer) == 0);
  EXPECT_OK(omnikv_stream_stats(stream, &json));
  EXPECT_HAS(json, "\"prompt_tokens\":");
  omnikv_free(json);
  omnikv_stream_free(stream);

  /* Requests that can never run say so. */
  EXPECT_OK(omnikv_batch_stream(batch, tokens, n, bad_policy, &stream));
  Drain(stream, pulled);
  EXPECT_REFUSED(pulled->status, OMNIKV_INVALID_ARGUMENT, "nonesuch");
  omnikv_stream_free(stream);
  EXPECT_OK(omnikv_batch_stream(batch, tokens, 0, NULL, &stream));
  EXPECT(omnikv_stream_next(stream, -1, NULL, &text, &bytes) == OMNIKV_INVALID_ARGUMENT);
  omnikv_stream_free(stream);
  EXPECT_REFUSED(omnikv_batch_stream(batch, tokens, n, seats, &stream), OMNIKV_INVALID_ARGUMENT,
                 "'seats' is no option of a request");
  EXPECT_REFUSED(omnikv_batch_submit(batch, tokens, n, NULL, OnPiece, NULL, NULL, NULL),
                 OMNIKV_INVALID_ARGUMENT, "NULL");

  /* Ended by its reader, and by its time. */
  EXPECT_OK(omnikv_batch_stream(batch, tokens, n, endless, &stream));
  memset(pulled, 0, sizeof *pulled);
  pulled->stop_after = 3;
  EXPECT(Drain(stream, pulled) == OMNIKV_FINISH_CANCELLED && pulled->pieces >= 3);
  omnikv_stream_free(stream);
  EXPECT_OK(omnikv_batch_stream(batch, tokens, n, hurried, &stream));
  memset(pulled, 0, sizeof *pulled);
  EXPECT(Drain(stream, pulled) == OMNIKV_FINISH_CANCELLED);
  omnikv_stream_free(stream);

  /* Its callbacks cannot stop it. One stream outlives it. */
  stopper.batch = batch;
  EXPECT_OK(omnikv_batch_submit(batch, tokens, n, NULL, NULL, StopsItsBatch, &stopper, &id));
  EXPECT_OK(omnikv_batch_stop(batch, 1));
  EXPECT(stopper.ended && stopper.stopped == OMNIKV_INVALID_ARGUMENT);
  EXPECT_REFUSED(omnikv_batch_stream(batch, tokens, n, NULL, &stream), OMNIKV_INVALID_ARGUMENT,
                 "stopped");
  EXPECT_OK(omnikv_batch_stats(batch, &json));
  EXPECT_HAS(json, "\"finished\":5");
  omnikv_free(json);
  EXPECT_OK(omnikv_batch_cancel(batch, id));
  omnikv_batch_free(batch);
  for (int i = 0; i < 3; ++i) {
    EXPECT(told[i].ends == 1 && told[i].status == OMNIKV_OK);
    EXPECT(strcmp(told[i].text, kAnswer) == 0 && told[i].finish == OMNIKV_FINISH_STOP);
  }
  EXPECT(told[3].ends == 1 && told[3].finish == OMNIKV_FINISH_CANCELLED);

  EXPECT_OK(omnikv_batch_new(engine, NULL, &batch));
  EXPECT_OK(omnikv_batch_stream(batch, tokens, n, endless, &endless_stream));
  EXPECT(omnikv_stream_next(endless_stream, 0, NULL, &text, &bytes) != OMNIKV_END);
  omnikv_batch_free(batch);
  memset(pulled, 0, sizeof *pulled);
  EXPECT(Drain(endless_stream, pulled) == OMNIKV_FINISH_CANCELLED);
  omnikv_stream_free(endless_stream);
  session = NewSession(engine); /* the engine is free again */
  omnikv_session_free(session);

  free(pulled);
  omnikv_free(tokens);
  omnikv_options_free(seats);
  omnikv_options_free(endless);
  omnikv_options_free(bad_policy);
  omnikv_options_free(hurried);
}

/* Handles end in any order. */
static void Order(void) {
  omnikv_engine* engine = Load("1");
  omnikv_session* session = NewSession(engine);
  omnikv_session* second = NULL;
  char* text = NULL;
  EXPECT(omnikv_session_new(engine, NULL, &second) != OMNIKV_OK && second == NULL);
  ReadPrompt(engine, session, kQuestion);
  omnikv_engine_free(engine);
  EXPECT_OK(omnikv_session_generate(session, NULL, NULL, NULL, &text, NULL, NULL));
  EXPECT(strcmp(text, kAnswer) == 0);
  omnikv_free(text);
  omnikv_session_free(session);
}

int main(int argc, char** argv) {
  static const struct {
    const char* name;
    void (*run)(omnikv_engine*);
  } kTests[] = {{"Library", Library},
                {"Mistakes", Mistakes},
                {"Answers", Answers},
                {"AllPieces", AllPieces},
                {"StepsAndForks", StepsAndForks},
                {"Files", Files},
                {"CancelledByAnother", CancelledByAnother},
                {"Threads", Threads},
                {"Batches", Batches}};
  if (argc > 1) folder = argv[1];
  for (size_t i = 0; i < sizeof kTests / sizeof kTests[0]; ++i) {
    /* One each, so that a test that leaves a session behind harms no other. */
    omnikv_engine* engine = Load("3");
    const int before = failures;
    test_name = kTests[i].name;
    kTests[i].run(engine);
    omnikv_engine_free(engine);
    printf("%s: %s\n", failures == before ? "ok" : "FAILED", test_name);
  }
  test_name = "Order";
  Order();
  printf("capi_test: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
