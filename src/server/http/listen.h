// Addresses that a server listens on, and their sockets.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "omnikv/status.h"

namespace omnikv::server {

// A listening socket. Closes it, unless Release was called, and removes the file of a unix socket
// if that is still its own. Thread-compatible.
class Listener {
 public:
  Listener(int fd, int family) : fd_(fd), family_(family) {}
  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&&) = delete;
  ~Listener();

  bool is_path() const { return !path_.empty(); }
  int family() const { return family_; }  // AF_INET, AF_INET6 or AF_UNIX
  // "127.0.0.1:8080", "[::1]:8080" or "unix:PATH", with the actual port.
  const std::string& address() const { return address_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  friend Result<std::vector<Listener>> ListenOn(std::string_view where);
  friend Result<Listener> ListenOnPath(const std::string& path);
  friend Result<Listener> ListenOnAddress(std::string_view where, const void* addrinfo, int port);

  int fd_;
  int family_;
  std::string address_;
  std::string path_;  // of a unix socket; empty: another kind, or moved from
  dev_t device_ = 0;  // of the file at path_
  ino_t inode_ = 0;
};

// Listens on `where`: "HOST:PORT", "[::1]:PORT" or "unix:PATH". HOST is a number or a name (all
// addresses that the name has here), PORT is 0 for any free port. A unix socket has mode 0600; the
// file of one on which nobody listens any more is replaced. kInvalidArgument names `listen`: the
// form is wrong, the name is unknown, or the address is in use, not this machine's or not allowed.
Result<std::vector<Listener>> ListenOn(std::string_view where);

}  // namespace omnikv::server
