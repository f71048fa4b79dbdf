// omnikv._omnikv: the C API for the Python package, which gives it types, names and manners.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <omnikv/c_api.h>

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct CancelledError : std::exception {
  explicit CancelledError(std::string text) : sentence(std::move(text)) {}
  const char* what() const noexcept override { return sentence.c_str(); }
  std::string sentence;
};

// Not ok: the exception of its kind, with the sentence. REQUIRES the GIL.
void Check(omnikv_status status) {
  if (status == OMNIKV_OK) return;
  const std::string sentence = omnikv_last_error();
  PyObject* type = PyExc_RuntimeError;
  switch (status) {
    case OMNIKV_INVALID_ARGUMENT:
    case OMNIKV_UNSUPPORTED:
    case OMNIKV_CORRUPT:
      type = PyExc_ValueError;
      break;
    case OMNIKV_NOT_FOUND:
      type = PyExc_FileNotFoundError;
      break;
    case OMNIKV_RESOURCE_EXHAUSTED:
      type = PyExc_MemoryError;
      break;
    case OMNIKV_CANCELLED:
      throw CancelledError(sentence);
    default:
      break;
  }
  PyErr_SetString(type, sentence.c_str());
  throw nb::python_error();
}

// `call`, while other threads of Python run. Its sentence stays this thread's.
template <typename Call>
omnikv_status WithoutGil(const Call& call) {
  const nb::gil_scoped_release release;
  return call();
}

struct Options {
  explicit Options(const Pairs& pairs) {
    Check(omnikv_options_new(&handle));
    for (const auto& [name, value] : pairs) {
      // What C would cut off.
      if (name.find('\0') != std::string::npos || value.find('\0') != std::string::npos) {
        omnikv_options_free(handle);
        throw nb::value_error(("the option '" + name + "' has a zero byte").c_str());
      }
      const omnikv_status status = omnikv_options_set(handle, name.c_str(), value.c_str());
      if (status == OMNIKV_OK) continue;
      omnikv_options_free(handle);
      Check(status);
    }
  }
  ~Options() { omnikv_options_free(handle); }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;
  omnikv_options* handle = nullptr;
};

// A handle that close() or the last reference ends, once the calls that hold it have returned.
template <typename T, void (*Free)(T*)>
class Shared {
 public:
  explicit Shared(T* handle)
      : handle_(handle, [](T* last) {
          const nb::gil_scoped_release release;  // freeing may wait for the engine
          Free(last);
        }) {}
  std::shared_ptr<T> hold() const {
    if (handle_ == nullptr) throw nb::value_error("it was closed");
    return handle_;
  }
  void Close() { handle_.reset(); }
  bool closed() const { return handle_ == nullptr; }
  std::mutex& mutex() const { return mutex_; }

 private:
  std::shared_ptr<T> handle_;
  mutable std::mutex mutex_;  // of what one thread at a time may do
};

using Engine = Shared<omnikv_engine, omnikv_engine_free>;
using Session = Shared<omnikv_session, omnikv_session_free>;
using Batch = Shared<omnikv_batch, omnikv_batch_free>;
using Stream = Shared<omnikv_stream, omnikv_stream_free>;

std::string Text(char* text) {
  const std::unique_ptr<char, void (*)(void*)> owned(text, omnikv_free);
  return owned.get();
}

nb::list List(int32_t* tokens, size_t n) {
  const std::unique_ptr<int32_t, void (*)(void*)> owned(tokens, omnikv_free);
  nb::list list;
  for (size_t i = 0; i < n; ++i) list.append(tokens[i]);
  return list;
}

// A callback of Python, and what it raised. Without one, Ctrl-C is seen at least.
struct Progress {
  nb::object call;
  std::exception_ptr raised;

  bool Tell(int64_t done, int64_t total) noexcept {
    const nb::gil_scoped_acquire acquire;
    if (raised) return false;
    try {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      return call.is_none() || !call(done, total).is(nb::bool_(false));
    } catch (...) {
      raised = std::current_exception();
      return false;
    }
  }
};

std::unique_ptr<Engine> LoadEngine(const Pairs& pairs, nb::object on_load) {
  const Options options(pairs);
  Progress progress{std::move(on_load), nullptr};
  omnikv_engine* engine = nullptr;
  const omnikv_status status = WithoutGil([&] {
    return omnikv_engine_load(
        options.handle,
        [](void* user, uint64_t done, uint64_t total) {
          static_cast<Progress*>(user)->Tell(static_cast<int64_t>(done),
                                             static_cast<int64_t>(total));
        },
        &progress, &engine);
  });
  auto made = engine == nullptr ? nullptr : std::make_unique<Engine>(engine);
  if (progress.raised) std::rethrow_exception(progress.raised);
  Check(status);
  return made;
}

void ReadPrompt(const Session& session, const Tokens& tokens, nb::object on_progress) {
  const auto held = session.hold();
  Progress progress{std::move(on_progress), nullptr};
  const omnikv_status status = WithoutGil([&] {
    return omnikv_session_prompt(
        held.get(), tokens.data(), tokens.size(),
        [](void* user, int64_t done, int64_t total) {
          return static_cast<Progress*>(user)->Tell(done, total) ? 0 : 1;
        },
        &progress);
  });
  if (progress.raised) std::rethrow_exception(progress.raised);
  Check(status);
}

// (token, text), or None after the last one.
nb::object Piece(omnikv_status status, int32_t token, const char* text, size_t bytes) {
  if (status == OMNIKV_END) return nb::none();
  Check(status);
  PyObject* const decoded = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(bytes), "replace");
  if (decoded == nullptr) throw nb::python_error();
  return nb::make_tuple(token, nb::steal(decoded));
}

nb::object NextOfSession(const Session& session) {
  const auto held = session.hold();
  int32_t token = -1;
  std::string text;
  // The piece is the session's until its next call, which another thread could make.
  const omnikv_status status = WithoutGil([&] {
    const char* piece = nullptr;
    size_t bytes = 0;
    const omnikv_status next = omnikv_session_next(held.get(), &token, &piece, &bytes);
    if (next == OMNIKV_OK) text.assign(piece, bytes);
    return next;
  });
  return Piece(status, token, text.data(), text.size());
}

nb::object NextOfStream(const Stream& stream) {
  const auto held = stream.hold();
  while (true) {
    int32_t token = -1;
    std::string text;
    const omnikv_status status = WithoutGil([&] {
      const std::lock_guard lock(stream.mutex());
      const char* piece = nullptr;
      size_t bytes = 0;
      const omnikv_status next = omnikv_stream_next(held.get(), 100, &token, &piece, &bytes);
      if (next == OMNIKV_OK) text.assign(piece, bytes);
      return next;
    });
    if (status != OMNIKV_NOT_YET) return Piece(status, token, text.data(), text.size());
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

nb::object FinishName(omnikv_finish finish) {
  switch (finish) {
    case OMNIKV_FINISH_STOP:
      return nb::str("stop");
    case OMNIKV_FINISH_LENGTH:
      return nb::str("length");
    case OMNIKV_FINISH_CANCELLED:
      return nb::str("cancelled");
    default:
      return nb::none();
  }
}

// The session's own memory: the array keeps the session.
nb::object LogitsOf(const Session& session) {
  auto held = std::make_unique<std::shared_ptr<omnikv_session>>(session.hold());
  const float* logits = nullptr;
  size_t n = 0;
  Check(WithoutGil([&] { return omnikv_session_logits(held->get(), &logits, &n); }));
  const nb::capsule owner(held.release(), [](void* p) noexcept {
    delete static_cast<std::shared_ptr<omnikv_session>*>(p);
  });
  return nb::cast(nb::ndarray<nb::numpy, const float, nb::ndim<1>>(logits, {n}, owner));
}

template <typename Call>
std::string Json(const Call& call) {
  char* json = nullptr;
  Check(WithoutGil([&] { return call(&json); }));
  return Text(json);
}

}  // namespace

NB_MODULE(_omnikv, m) {
  nb::exception<CancelledError>(m, "Cancelled", PyExc_RuntimeError);
  m.def("version", [] { return omnikv_version(); });
  m.def("c_api_version", [] { return omnikv_c_api_version(); });
  m.def("set_log_level", [](int32_t level) { Check(omnikv_set_log_level(level)); });
  if (omnikv_c_api_version() < OMNIKV_C_API_VERSION) {
    throw nb::import_error("libomnikv is older than this package");
  }

  nb::class_<Engine>(m, "Engine")
      .def("close", &Engine::Close)
      .def_prop_ro("closed", &Engine::closed)
      .def("context", [](const Engine& e) { return omnikv_engine_context(e.hold().get()); })
      .def("vocab", [](const Engine& e) { return omnikv_engine_vocab(e.hold().get()); })
      .def("info",
           [](const Engine& e) {
             const auto held = e.hold();
             return Json([&](char** json) { return omnikv_engine_info(held.get(), json); });
           })
      .def("tokenize",
           [](const Engine& e, const std::string& text, bool add_special, bool parse_special) {
             const auto held = e.hold();
             int32_t* tokens = nullptr;
             size_t n = 0;
             Check(WithoutGil([&] {
               return omnikv_engine_tokenize(held.get(), text.data(), text.size(), add_special,
                                             parse_special, &tokens, &n);
             }));
             return List(tokens, n);
           })
      .def("detokenize",
           [](const Engine& e, const Tokens& tokens) {
             const auto held = e.hold();
             char* text = nullptr;
             size_t bytes = 0;
             Check(WithoutGil([&] {
               return omnikv_engine_detokenize(held.get(), tokens.data(), tokens.size(), &text,
                                               &bytes);
             }));
             const std::unique_ptr<char, void (*)(void*)> owned(text, omnikv_free);
             return nb::bytes(text, bytes);
           })
      .def(
          "chat_prompt",
          [](const Engine& e, const Pairs& messages) {
            const auto held = e.hold();
            std::vector<const char*> roles, contents;
            for (const auto& [role, content] : messages) {
              if (role.find('\0') != std::string::npos || content.find('\0') != std::string::npos) {
                throw nb::value_error("a message has a zero byte");
              }
              roles.push_back(role.c_str());
              contents.push_back(content.c_str());
            }
            int32_t* tokens = nullptr;
            size_t n = 0;
            Check(WithoutGil([&] {
              return omnikv_engine_chat_prompt(held.get(), roles.data(), contents.data(),
                                               roles.size(), &tokens, &n);
            }));
            return List(tokens, n);
          })
      .def("session",
           [](const Engine& e, const Pairs& pairs) {
             const auto held = e.hold();
             const Options options(pairs);
             omnikv_session* session = nullptr;
             Check(WithoutGil(
                 [&] { return omnikv_session_new(held.get(), options.handle, &session); }));
             return std::make_unique<Session>(session);
           })
      .def("restore",
           [](const Engine& e, const std::string& path) {
             const auto held = e.hold();
             omnikv_session* session = nullptr;
             Check(WithoutGil(
                 [&] { return omnikv_session_restore(held.get(), path.c_str(), &session); }));
             return std::make_unique<Session>(session);
           })
      .def("batch", [](const Engine& e, const Pairs& pairs) {
        const auto held = e.hold();
        const Options options(pairs);
        omnikv_batch* batch = nullptr;
        Check(WithoutGil([&] { return omnikv_batch_new(held.get(), options.handle, &batch); }));
        return std::make_unique<Batch>(batch);
      });
  m.def("load", &LoadEngine, nb::arg("options"), nb::arg("on_load").none());

  nb::class_<Session>(m, "Session")
      .def("close", &Session::Close)
      .def_prop_ro("closed", &Session::closed)
      .def("prompt", &ReadPrompt, nb::arg("tokens"), nb::arg("on_progress").none())
      .def("begin",
           [](const Session& s, const Pairs& pairs) {
             const auto held = s.hold();
             const Options options(pairs);
             Check(WithoutGil([&] { return omnikv_session_begin(held.get(), options.handle); }));
           })
      .def("next", &NextOfSession)
      .def("finish",
           [](const Session& s) {
             const auto held = s.hold();
             omnikv_finish finish = OMNIKV_FINISH_NONE;
             Check(WithoutGil([&] { return omnikv_session_finish(held.get(), &finish); }));
             return FinishName(finish);
           })
      .def("step",
           [](const Session& s, int32_t token) {
             const auto held = s.hold();
             Check(WithoutGil([&] { return omnikv_session_step(held.get(), token); }));
           })
      .def("logits", &LogitsOf)
      .def("tokens",
           [](const Session& s) {
             const auto held = s.hold();
             int32_t* tokens = nullptr;
             size_t n = 0;
             Check(WithoutGil([&] { return omnikv_session_tokens(held.get(), &tokens, &n); }));
             return List(tokens, n);
           })
      .def(
          "fork",
          [](const Session& s, const std::optional<Pairs>& pairs) {
            const auto held = s.hold();
            std::optional<Options> options;
            if (pairs) options.emplace(*pairs);
            omnikv_session* fork = nullptr;
            Check(WithoutGil([&] {
              return omnikv_session_fork(held.get(), options ? options->handle : nullptr, &fork);
            }));
            return std::make_unique<Session>(fork);
          },
          nb::arg("options").none())
      .def("save",
           [](const Session& s, const std::string& path) {
             const auto held = s.hold();
             Check(WithoutGil([&] { return omnikv_session_save(held.get(), path.c_str()); }));
           })
      .def("cancel", [](const Session& s) { omnikv_session_cancel(s.hold().get()); })
      .def("stats", [](const Session& s) {
        const auto held = s.hold();
        return Json([&](char** json) { return omnikv_session_stats(held.get(), json); });
      });

  nb::class_<Batch>(m, "Batch")
      .def("close", &Batch::Close)
      .def_prop_ro("closed", &Batch::closed)
      .def("stream",
           [](const Batch& b, const Tokens& tokens, const Pairs& pairs) {
             const auto held = b.hold();
             const Options options(pairs);
             omnikv_stream* stream = nullptr;
             Check(WithoutGil([&] {
               return omnikv_batch_stream(held.get(), tokens.data(), tokens.size(), options.handle,
                                          &stream);
             }));
             return std::make_unique<Stream>(stream);
           })
      .def("stop",
           [](const Batch& b, bool drain) {
             const auto held = b.hold();
             Check(WithoutGil([&] { return omnikv_batch_stop(held.get(), drain); }));
           })
      .def("stats", [](const Batch& b) {
        const auto held = b.hold();
        return Json([&](char** json) { return omnikv_batch_stats(held.get(), json); });
      });

  nb::class_<Stream>(m, "Stream")
      .def("close", &Stream::Close)
      .def("next", &NextOfStream)
      .def("finish",
           [](const Stream& s) {
             const auto held = s.hold();
             omnikv_finish finish = OMNIKV_FINISH_NONE;
             Check(omnikv_stream_finish(held.get(), &finish));
             return FinishName(finish);
           })
      .def("cancel", [](const Stream& s) { omnikv_stream_cancel(s.hold().get()); })
      .def("stats", [](const Stream& s) {
        const auto held = s.hold();
        return Json([&](char** json) { return omnikv_stream_stats(held.get(), json); });
      });
}
