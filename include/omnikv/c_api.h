/* The C API: C99, for programs and bindings in other languages. See tests/capi/package/main.c.
 *
 *   omnikv_options* options = NULL;
 *   omnikv_engine* engine = NULL;
 *   omnikv_options_new(&options);
 *   omnikv_options_set(options, "model", "model.gguf");
 *   if (omnikv_engine_load(options, NULL, NULL, &engine) != OMNIKV_OK)
 *     fprintf(stderr, "%s\n", omnikv_last_error());
 *
 * Errors: every call that can fail returns a status. omnikv_last_error() is the sentence of the
 * last call of this thread that failed. Handles and pointers that a call needs may be NULL by
 * mistake: OMNIKV_INVALID_ARGUMENT. A call that fails sets its results to NULL or 0.
 *
 * Threads: any function may be called from any thread. Calls on an engine and its sessions run one
 * at a time: one waits for the other's end. What waits for nobody: omnikv_session_cancel, all of a
 * batch and its streams, the texts of an engine (tokenize, detokenize, chat_prompt) and what is
 * said of it. Only one thread at a time may use a handle of options or read a stream, and
 * nobody may use a handle while it is freed.
 *
 * Callbacks get the `user` of their call. They must not throw or jump out. Those of a session run
 * on the calling thread, and no call on the same engine's sessions can be made from them but
 * omnikv_session_cancel (OMNIKV_INVALID_ARGUMENT).
 *
 * Memory: what a call gives as char** or int32_t** is the caller's, who ends it with omnikv_free.
 * const pointers are the library's, valid as long as their function says. Handles end with their
 * _free function, NULL included, in any order: an engine lives on until its sessions and batches
 * are freed.
 *
 * Text is UTF-8. Text that comes with a number of bytes may contain zeros; text that a call gives
 * has a zero behind its last byte besides.
 *
 * Versions: OMNIKV_C_API_VERSION grows with each addition. Nothing that is here changes or goes
 * while the library's SONAME stays. That is why options are names and values rather than structs,
 * and statistics are JSON: both grow without touching a layout, and a binding passes its
 * keyword arguments as they are. Numbers of enums may be added; names and meanings stay.
 */
#ifndef OMNIKV_C_API_H_
#define OMNIKV_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* NOLINTBEGIN(readability-identifier-naming): names of C. */

#define OMNIKV_C_API_VERSION 1

#define OMNIKV_API __attribute__((visibility("default")))

typedef enum omnikv_status {
  OMNIKV_OK = 0,
  OMNIKV_INVALID_ARGUMENT = 1,   /* an argument or an option is wrong: the caller can mend it */
  OMNIKV_NOT_FOUND = 2,          /* a path or a name does not exist */
  OMNIKV_UNSUPPORTED = 3,        /* well-formed, but this build or this machine cannot run it */
  OMNIKV_CORRUPT = 4,            /* a file contradicts itself or its format */
  OMNIKV_RESOURCE_EXHAUSTED = 5, /* memory does not hold what was asked for */
  OMNIKV_CANCELLED = 6,          /* the caller stopped it */
  OMNIKV_FAILED = 7,             /* anything else: I/O errors, devices */
  /* No errors, and without a sentence: */
  OMNIKV_END = 100,     /* there are no more pieces */
  OMNIKV_NOT_YET = 101, /* no piece came in time */
} omnikv_status;

typedef enum omnikv_finish {
  OMNIKV_FINISH_NONE = 0,      /* it goes on, or failed */
  OMNIKV_FINISH_STOP = 1,      /* an end token or a stop text */
  OMNIKV_FINISH_LENGTH = 2,    /* `max_tokens`, or a full context */
  OMNIKV_FINISH_CANCELLED = 3, /* the caller */
} omnikv_finish;

typedef struct omnikv_options omnikv_options;
typedef struct omnikv_engine omnikv_engine;
typedef struct omnikv_session omnikv_session;
typedef struct omnikv_batch omnikv_batch;
typedef struct omnikv_stream omnikv_stream;

/* Tokens of a prompt that are read, of all. Anything but 0 cancels. */
typedef int (*omnikv_progress)(void* user, int64_t done, int64_t total);
/* Bytes of weights that are loaded, of all. */
typedef void (*omnikv_load_progress)(void* user, uint64_t done, uint64_t total);
/* New text of an answer, whole characters, for the time of the call. Anything but 0 ends it. */
typedef int (*omnikv_on_text)(void* user, const char* text, size_t bytes);
/* The same of a request in a batch, once for each token: `bytes` may be 0. Text that was held back
 * until the end comes with token -1. */
typedef int (*omnikv_on_piece)(void* user, int32_t token, const char* text, size_t bytes);
/* The last call for a request. `error` is the sentence of a status that is not OMNIKV_OK, else
 * empty; `stats_json` as omnikv_stream_stats gives it, "{}" for an error. */
typedef void (*omnikv_on_end)(void* user, omnikv_status status, const char* error,
                              omnikv_finish finish, const char* stats_json);

/* --- The library. */

/* OMNIKV_C_API_VERSION of the library that runs: at least that of the header it is used with. */
OMNIKV_API int32_t omnikv_c_api_version(void);
OMNIKV_API const char* omnikv_version(void); /* "0.1.0" */
/* The sentence of the last call of this thread that failed, until the next that fails. It names the
 * option (`context`), the value and what was expected. Empty: none failed. */
OMNIKV_API const char* omnikv_last_error(void);
OMNIKV_API void omnikv_free(void* memory);
/* What the library says on stderr: 0 nothing, 1 what people should know (the default), 2 more. */
OMNIKV_API omnikv_status omnikv_set_log_level(int32_t level);

/* --- Options: names and values as text. A call says which ones it reads, and refuses others. NULL
 * in place of options means their defaults. Numbers may have a unit where the C++ API has whole
 * ones ("32k", "8GiB"); true and false are 1 and 0. A name that is set again has the later value;
 * `stop` and `logit_bias` add one each time.
 *
 * of an engine   model (required), device, threads, host_memory, gpu_memory, context, place,
 *                kv_folder, disk_space, host_reads, working_set, kv_dtype, precision,
 *                prefill_chunk, shared_products, max_sessions, kv_tokens ("fit": as many as fit),
 *                kept_contexts, and those of a policy, which `place` auto reckons with
 * of a policy    policy, policy.NAME for its setting NAME (policy.budget), force_indices
 * of an answer   max_tokens, temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty,
 *                frequency_penalty, logit_bias ("TOKEN=BIAS"), seed, stop, ignore_eos
 * of a request   those of a policy and of an answer, priority (higher goes first), timeout_seconds
 * of a batch     seats (default: the engine's max_sessions, 64 at most), max_waiting, token_ms,
 *                store (a folder for contexts), store_size
 *
 * omnikv/options.h explains them, and docs/serving.md those of batches. */
OMNIKV_API omnikv_status omnikv_options_new(omnikv_options** options);
OMNIKV_API void omnikv_options_free(omnikv_options* options);
/* OMNIKV_INVALID_ARGUMENT when nothing has an option of this name, or text is not UTF-8. Values are
 * checked by the call that reads them. */
OMNIKV_API omnikv_status omnikv_options_set(omnikv_options* options, const char* name,
                                            const char* value);

/* --- An engine holds a model. */

/* Loads a model, weights included. `progress` may be NULL. */
OMNIKV_API omnikv_status omnikv_engine_load(const omnikv_options* options,
                                            omnikv_load_progress progress, void* user,
                                            omnikv_engine** engine);
OMNIKV_API void omnikv_engine_free(omnikv_engine* engine);

/* Tokens that a session can hold; tokens that there are; the device, for people. 0 and "" for NULL.
 * The device's name is valid as long as the engine. */
OMNIKV_API int64_t omnikv_engine_context(const omnikv_engine* engine);
OMNIKV_API int32_t omnikv_engine_vocab(const omnikv_engine* engine);
OMNIKV_API const char* omnikv_engine_device(const omnikv_engine* engine);
/* A JSON object: context, vocab, device, weight_bytes, load_seconds, has_chat_template. */
OMNIKV_API omnikv_status omnikv_engine_info(const omnikv_engine* engine, char** json);

/* Ids of a text: no chat format. `add_special`: with what the tokenizer adds by itself (a
 * begin-of-text token). `parse_special`: special tokens in the text become their ids. */
OMNIKV_API omnikv_status omnikv_engine_tokenize(const omnikv_engine* engine, const char* text,
                                                size_t bytes, int add_special, int parse_special,
                                                int32_t** tokens, size_t* n);
/* The text of ids, special tokens included. `bytes` may be NULL. */
OMNIKV_API omnikv_status omnikv_engine_detokenize(const omnikv_engine* engine,
                                                  const int32_t* tokens, size_t n, char** text,
                                                  size_t* bytes);
/* `n` messages in the model's chat format, ready for the answer: roles ("system", "user",
 * "assistant") and contents. Special tokens in contents stay text. */
OMNIKV_API omnikv_status omnikv_engine_chat_prompt(const omnikv_engine* engine,
                                                   const char* const* roles,
                                                   const char* const* contents, size_t n,
                                                   int32_t** tokens, size_t* n_tokens);

/* --- A session holds one context. */

/* Options: of a policy. `max_sessions` of them can be open at once. */
OMNIKV_API omnikv_status omnikv_session_new(omnikv_engine* engine, const omnikv_options* options,
                                            omnikv_session** session);
/* The session that omnikv_session_save wrote; its policy is as it was. A damaged file is
 * OMNIKV_CORRUPT, one of another model or policy OMNIKV_INVALID_ARGUMENT. */
OMNIKV_API omnikv_status omnikv_session_restore(omnikv_engine* engine, const char* path,
                                                omnikv_session** session);
OMNIKV_API void omnikv_session_free(omnikv_session* session);

/* Makes `tokens` the context: what the session already holds of them is kept, the rest is computed.
 * `progress` may be NULL. OMNIKV_CANCELLED after a cancel; what was computed stays. */
OMNIKV_API omnikv_status omnikv_session_prompt(omnikv_session* session, const int32_t* tokens,
                                               size_t n, omnikv_progress progress, void* user);

/* Generates after the prompt, or goes on from the last answer. Options: of an answer. `on_text`,
 * `text`, `bytes` and `finish` may be NULL. A cancel makes it end, not fail. */
OMNIKV_API omnikv_status omnikv_session_generate(omnikv_session* session,
                                                 const omnikv_options* options,
                                                 omnikv_on_text on_text, void* user, char** text,
                                                 size_t* bytes, omnikv_finish* finish);

/* The same in pieces that the caller asks for: begin checks the options, and each next computes one
 * token and gives it with the text that can be shown since the one before (`bytes` may be 0; what
 * was held back until the end comes with token -1). OMNIKV_END: there are no more. The text is
 * valid until the next call on the session. `token` may be NULL. The tokens are those of
 * omnikv_session_generate. On a card each token waits for the one before, which
 * omnikv_session_generate overlaps. Other calls may come between: begin anew after a prompt or a
 * step. */
OMNIKV_API omnikv_status omnikv_session_begin(omnikv_session* session,
                                              const omnikv_options* options);
OMNIKV_API omnikv_status omnikv_session_next(omnikv_session* session, int32_t* token,
                                             const char** text, size_t* bytes);
/* How what began has ended. */
OMNIKV_API omnikv_status omnikv_session_finish(omnikv_session* session, omnikv_finish* finish);

/* Appends one token and computes the logits after it, for callers that sample themselves. */
OMNIKV_API omnikv_status omnikv_session_step(omnikv_session* session, int32_t token);
/* The logits of the last position, valid until the next call on the session; `n` is the vocabulary.
 * OMNIKV_INVALID_ARGUMENT before the first prompt or step. */
OMNIKV_API omnikv_status omnikv_session_logits(omnikv_session* session, const float** logits,
                                               size_t* n);
/* The tokens in context. The last one of an answer joins them with the next. */
OMNIKV_API omnikv_status omnikv_session_tokens(omnikv_session* session, int32_t** tokens,
                                               size_t* n);

/* Another session with the same context, sharing its memory until they part. With options (of a
 * policy), under another policy: omnikv/engine.h, Session::Fork, says what is computed anew. */
OMNIKV_API omnikv_status omnikv_session_fork(omnikv_session* session, const omnikv_options* options,
                                             omnikv_session** fork);
/* Writes the context to a file for omnikv_session_restore, whole or not at all. */
OMNIKV_API omnikv_status omnikv_session_save(omnikv_session* session, const char* path);
/* Stops a prompt after the chunk it is at, or an answer before its next token; between the two,
 * that answer. Waits for nobody, and may be called from a signal handler. NULL does nothing. */
OMNIKV_API void omnikv_session_cancel(omnikv_session* session);
/* A JSON object of the fields of omnikv/stats.h; hit_rate is null where there is none. */
OMNIKV_API omnikv_status omnikv_session_stats(omnikv_session* session, char** json);

/* --- A batch: many requests on one engine, run by a thread of its own. While it is there, the
 * engine has no sessions: OMNIKV_INVALID_ARGUMENT for either beside the other. */

OMNIKV_API omnikv_status omnikv_batch_new(omnikv_engine* engine, const omnikv_options* options,
                                          omnikv_batch** batch);
/* Stops it at once, unless it was stopped. Not from its callbacks. */
OMNIKV_API void omnikv_batch_free(omnikv_batch* batch);

/* Hands a request over (options: of a request) and returns. The callbacks run on the batch's
 * thread, which they must not hold up, and may call what waits for nobody; those of requests that
 * a stop ends, on the thread that stops it. `on_piece` may be NULL, `on_end` not. It is called
 * once unless this call fails; what is wrong with tokens, a policy or memory it says, too.
 * `id`, of omnikv_batch_cancel, may be NULL; callbacks may come before it is set. */
OMNIKV_API omnikv_status omnikv_batch_submit(omnikv_batch* batch, const int32_t* tokens, size_t n,
                                             const omnikv_options* options,
                                             omnikv_on_piece on_piece, omnikv_on_end on_end,
                                             void* user, uint64_t* id);
/* Ends a request, unless it has ended. */
OMNIKV_API omnikv_status omnikv_batch_cancel(omnikv_batch* batch, uint64_t id);
/* A JSON object of counts since the start: running, waiting, finished, refused, ... */
OMNIKV_API omnikv_status omnikv_batch_stats(omnikv_batch* batch, char** json);
/* Takes no more requests. Returns when those that are there have ended: by themselves when it
 * drains, else as cancelled. Not from its callbacks (OMNIKV_INVALID_ARGUMENT). */
OMNIKV_API omnikv_status omnikv_batch_stop(omnikv_batch* batch, int drain);

/* A request whose pieces are asked for. It goes on meanwhile, and pieces wait in the stream. */
OMNIKV_API omnikv_status omnikv_batch_stream(omnikv_batch* batch, const int32_t* tokens, size_t n,
                                             const omnikv_options* options, omnikv_stream** stream);
/* The next piece, as omnikv_session_next gives it: OMNIKV_END after the last one, the status of a
 * request that failed, OMNIKV_NOT_YET where none came within so many milliseconds (-1: waits
 * for it). The text is valid until the next call of this function, or the stream is freed. */
OMNIKV_API omnikv_status omnikv_stream_next(omnikv_stream* stream, int64_t timeout_ms,
                                            int32_t* token, const char** text, size_t* bytes);
/* Ends the request, unless it has ended. NULL does nothing. */
OMNIKV_API void omnikv_stream_cancel(omnikv_stream* stream);
/* How it has ended. */
OMNIKV_API omnikv_status omnikv_stream_finish(omnikv_stream* stream, omnikv_finish* finish);
/* A JSON object, "{}" until the end: policy, settings, prompt_tokens, cached_tokens, stored_tokens,
 * answer_tokens, queue_seconds, prefill_seconds, decode_seconds, read_fraction, attended_tokens,
 * held_bytes (of its K/V: device, host, disk), hit_rate and fetched_bytes (where layers are read
 * through working sets, else null and 0), stop (the stop text that ended it). */
OMNIKV_API omnikv_status omnikv_stream_stats(omnikv_stream* stream, char** json);
/* Cancels it, unless it has ended. */
OMNIKV_API void omnikv_stream_free(omnikv_stream* stream);

/* NOLINTEND(readability-identifier-naming) */

#ifdef __cplusplus
}
#endif

#endif /* OMNIKV_C_API_H_ */
