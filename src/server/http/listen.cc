#include "server/http/listen.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

#include "base/printable.h"

namespace omnikv::server {
namespace {

constexpr int kBacklog = 1024;

Status Refusal(std::string_view where, const std::string& reason) {
  return InvalidArgument(
      fmt::format("`listen` is {}, which cannot be listened on: {}", Printable(where), reason));
}

std::string AddressText(const sockaddr* address, socklen_t size) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(address, size, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "?";
  }
  return address->sa_family == AF_INET6 ? fmt::format("[{}]:{}", host, port)
                                        : fmt::format("{}:{}", host, port);
}

int PortOf(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// Whether `entry` has the address of one before it: /etc/hosts may name an address twice.
bool IsRepeated(const addrinfo* first, const addrinfo* entry) {
  for (; first != entry; first = first->ai_next) {
    if (first->ai_addrlen == entry->ai_addrlen &&
        std::memcmp(first->ai_addr, entry->ai_addr, entry->ai_addrlen) == 0) {
      return true;
    }
  }
  return false;
}

// Whether somebody listens on the unix socket at `address`.
bool Answers(const sockaddr_un& address) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return true;  // not known: better an error than another's socket removed
  const int rc = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const bool refused = rc != 0 && errno == ECONNREFUSED;
  close(fd);
  return !refused;
}

}  // namespace

Listener::Listener(Listener&& other) noexcept
    : fd_(other.Release()),
      family_(other.family_),
      address_(std::move(other.address_)),
      path_(std::exchange(other.path_, std::string())),
      device_(other.device_),
      inode_(other.inode_) {}

Listener::~Listener() {
  if (!path_.empty()) {
    struct stat file;
    if (lstat(path_.c_str(), &file) == 0 && file.st_dev == device_ && file.st_ino == inode_) {
      unlink(path_.c_str());
    }
  }
  if (fd_ >= 0) close(fd_);
}

Result<Listener> ListenOnPath(const std::string& path) {
  const std::string where = "unix:" + path;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path) ||
      path.find('\0') != std::string::npos) {
    return InvalidArgument(fmt::format("`listen` is {}, expected a path of 1 to {} bytes",
                                       Printable(where), sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  struct stat file;
  if (lstat(path.c_str(), &file) == 0) {
    if (!S_ISSOCK(file.st_mode)) return Refusal(where, "the file is not a socket");
    if (Answers(address)) return Refusal(where, "another program listens on it");
    unlink(path.c_str());  // left behind by a program that was killed
  }
  Listener listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), AF_UNIX);
  if (listener.fd_ < 0) return Refusal(where, ErrorText(errno));
  fchmod(listener.fd_, 0600);  // before bind: the file is never open to others, on Linux
  if (bind(listener.fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Refusal(where, ErrorText(errno));
  }
  if (lstat(path.c_str(), &file) != 0) return Refusal(where, ErrorText(errno));
  listener.address_ = where;
  listener.path_ = path;
  listener.device_ = file.st_dev;
  listener.inode_ = file.st_ino;
  if (chmod(path.c_str(), 0600) != 0 || listen(listener.fd_, kBacklog) != 0) {
    return Refusal(where, ErrorText(errno));
  }
  return listener;
}

// `info` is an addrinfo; `port` is used in place of its 0, 0 for any.
Result<Listener> ListenOnAddress(std::string_view where, const void* info, int port) {
  const auto& found = *static_cast<const addrinfo*>(info);
  sockaddr_storage address = {};
  std::memcpy(&address, found.ai_addr, found.ai_addrlen);
  if (port != 0) {
    if (address.ss_family == AF_INET6) {
      reinterpret_cast<sockaddr_in6&>(address).sin6_port = htons(static_cast<uint16_t>(port));
    } else {
      reinterpret_cast<sockaddr_in&>(address).sin_port = htons(static_cast<uint16_t>(port));
    }
  }
  Listener listener(socket(found.ai_family, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP),
                    found.ai_family);
  if (listener.fd_ < 0) return Failed(ErrorText(errno));
  const int one = 1;
  setsockopt(listener.fd_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  // [::] means IPv6 alone, so that 0.0.0.0 can stand beside it.
  if (found.ai_family == AF_INET6) {
    setsockopt(listener.fd_, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
  }
  socklen_t size = found.ai_addrlen;
  if (bind(listener.fd_, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener.fd_, kBacklog) != 0) {
    const int error = errno;
    if (error == EADDRNOTAVAIL) return NotFound(ErrorText(error));
    return Refusal(where, ErrorText(error));
  }
  size = sizeof(address);
  getsockname(listener.fd_, reinterpret_cast<sockaddr*>(&address), &size);
  listener.address_ = AddressText(reinterpret_cast<const sockaddr*>(&address), size);
  return listener;
}

Result<std::vector<Listener>> ListenOn(std::string_view where) {
  std::vector<Listener> listeners;
  if (where.substr(0, 5) == "unix:") {
    OKV_ASSIGN_OR_RETURN(Listener listener, ListenOnPath(std::string(where.substr(5))));
    listeners.push_back(std::move(listener));
    return listeners;
  }
  const Status form = InvalidArgument(fmt::format(
      "`listen` is {}, expected HOST:PORT, [IPv6]:PORT or unix:PATH", Printable(where)));
  const size_t colon = where.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return form;
  std::string_view host = where.substr(0, colon);
  const std::string_view port_text = where.substr(colon + 1);
  uint16_t port = 0;
  const auto [end, error] =
      std::from_chars(port_text.data(), port_text.data() + port_text.size(), port);
  if (error != std::errc() || end != port_text.data() + port_text.size()) return form;
  if (host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') return form;
    host = host.substr(1, host.size() - 2);
  } else if (host.find_first_of(":[]") != std::string_view::npos) {
    return form;
  }
  if (host.find('\0') != std::string_view::npos) return form;

  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_protocol = IPPROTO_TCP;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int rc =
      getaddrinfo(std::string(host).c_str(), std::to_string(port).c_str(), &hints, &found);
  if (rc != 0) return Refusal(where, gai_strerror(rc));
  // A name may have an address that this machine has not (::1 without IPv6): the others serve.
  Status last;
  Status refusal;
  int used_port = port;
  for (const addrinfo* entry = found; entry != nullptr && refusal.ok(); entry = entry->ai_next) {
    if (IsRepeated(found, entry)) continue;
    auto listener = ListenOnAddress(where, entry, used_port);
    if (listener.ok()) {
      sockaddr_storage bound = {};
      socklen_t size = sizeof(bound);
      getsockname(listener->fd_, reinterpret_cast<sockaddr*>(&bound), &size);
      used_port = PortOf(bound);  // one port for all addresses of a name
      listeners.push_back(std::move(*listener));
    } else if (listener.status().code() == StatusCode::kInvalidArgument) {
      refusal = listener.status();
    } else {
      last = listener.status();
    }
  }
  freeaddrinfo(found);
  if (!refusal.ok()) return refusal;
  if (listeners.empty()) return Refusal(where, last.message());
  return listeners;
}

}  // namespace omnikv::server
