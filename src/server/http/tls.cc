#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>

#include "base/printable.h"
#include "server/http/io.h"

namespace omnikv::server {
namespace {

// Without it OpenSSL asks the terminal for the pass phrase of a key.
int NoPassPhrase(char*, int, int, void*) {
  return -1;
}

// OpenSSL's newest reason, and none left behind.
std::string TakeReason() {
  const unsigned long error = ERR_peek_last_error();
  const char* reason = ERR_reason_error_string(error);
  ERR_clear_error();
  return reason != nullptr ? reason : "unknown";
}

Status CheckReadable(const char* field, const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  const int error = errno;
  if (file == nullptr) {
    return InvalidArgument(fmt::format("`{}` is {}, which cannot be read: {}", field,
                                       Printable(path), ErrorText(error)));
  }
  std::fclose(file);
  return Status();
}

}  // namespace

Result<std::shared_ptr<TlsContext>> TlsContext::Load(const std::string& certificate_file,
                                                     const std::string& key_file) {
  OKV_RETURN_IF_ERROR(CheckReadable("certificate_file", certificate_file));
  OKV_RETURN_IF_ERROR(CheckReadable("key_file", key_file));
  ERR_clear_error();
  SSL_CTX* native = SSL_CTX_new(TLS_server_method());
  if (native == nullptr) return Failed("TLS cannot be set up: " + TakeReason());
  std::shared_ptr<TlsContext> context(new TlsContext(native));
  SSL_CTX_set_min_proto_version(native, TLS1_2_VERSION);
  SSL_CTX_set_options(native, SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_mode(native, SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_session_cache_mode(native, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_default_passwd_cb(native, NoPassPhrase);
  if (SSL_CTX_use_certificate_chain_file(native, certificate_file.c_str()) != 1) {
    return InvalidArgument(
        fmt::format("`certificate_file` is {}, expected a certificate in PEM ({})",
                    Printable(certificate_file), TakeReason()));
  }
  // The key is read before it is compared, so that each mistake has its sentence.
  if (SSL_CTX_use_PrivateKey_file(native, key_file.c_str(), SSL_FILETYPE_PEM) != 1) {
    const bool other = ERR_GET_LIB(ERR_peek_last_error()) == ERR_LIB_X509;
    const std::string reason = TakeReason();
    if (other) {
      return InvalidArgument(fmt::format("`key_file` is {}, which is not the key of {} ({})",
                                         Printable(key_file), Printable(certificate_file), reason));
    }
    return InvalidArgument(
        fmt::format("`key_file` is {}, expected a private key in PEM without a pass phrase ({})",
                    Printable(key_file), reason));
  }
  if (SSL_CTX_check_private_key(native) != 1) {
    return InvalidArgument(fmt::format("`key_file` is {}, which is not the key of {} ({})",
                                       Printable(key_file), Printable(certificate_file),
                                       TakeReason()));
  }
  return context;
}

TlsContext::~TlsContext() {
  SSL_CTX_free(context_);
}

}  // namespace omnikv::server
