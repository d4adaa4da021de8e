/* A fast engine for bench/serve.py: HTTP/1.1, one thread, epoll.

   It answers chats with fixed words. A stream gets one write per token, all streams in turn, as an engine that computes
   a batch does; with "pace_ms" in the request a token each so many milliseconds, else as fast as the machine can.
   GET /counters shows how many connections and requests there were. Usage: stub KEY [PORT]; prints its port. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 4096, BUFFER = 65536 };

struct peer {
    int fd, used, is_streaming, is_blocked, left, pace_ms, at; /* `at` is the place in `active` */
    double due;
    char buffer[BUFFER];
    const char *pending; /* bytes of a write that the socket did not take yet */
    size_t pending_length;
};

static struct peer *peers[MOST * 4], *active[MOST];
static int active_count, poller;
static long connections, requests;
static const char *key;
static char token[512], head_and_token[1024], plain[1024];
static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char denied[] = "HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\n{}";

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static void watch(struct peer *p, int operation, unsigned events) {
    struct epoll_event e = {.events = events, .data.fd = p->fd};
    epoll_ctl(poller, operation, p->fd, &e);
}

static void stop_stream(struct peer *p) {
    if (!p->is_streaming) return;
    active[p->at] = active[--active_count];
    active[p->at]->at = p->at;
    p->is_streaming = 0;
}

static void drop(struct peer *p) {
    stop_stream(p);
    peers[p->fd] = NULL;
    close(p->fd);
    free(p);
}

/* 0 if the peer is gone. */
static int put(struct peer *p, const char *bytes, size_t length) {
    ssize_t n = send(p->fd, bytes, length, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) return drop(p), 0;
    if (n < 0) n = 0;
    if ((size_t)n < length) {
        p->pending = bytes + n;
        p->pending_length = length - n;
        p->is_blocked = 1;
        watch(p, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
    }
    return 1;
}

static int put_text(struct peer *p, const char *text) { return put(p, text, strlen(text)); }

static void step(struct peer *p) {
    if (p->left > 0) {
        p->left--;
        p->due += p->pace_ms;
        put_text(p, token);
    } else {
        stop_stream(p);
        put_text(p, end);
    }
}

static int answer(struct peer *p, char *head, char *body) {
    static char counters[256];
    requests++;
    if (!strncmp(head, "GET /counters", 13)) {
        char shown[128];
        int n = sprintf(shown, "{\"connections\":%ld,\"requests\":%ld}", connections, requests);
        sprintf(counters, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", n, shown);
        return put_text(p, counters);
    }
    if (!strncmp(head, "GET /health", 11)) return put_text(p, "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}");
    if (*key && !strstr(head, key)) return put_text(p, denied);
    if (!strstr(body, "\"stream\":true")) return put_text(p, plain);
    char *wanted = strstr(body, "\"max_tokens\":"), *pace = strstr(body, "\"pace_ms\":");
    p->left = (wanted ? atoi(wanted + 13) : 64) - 1;
    p->pace_ms = pace ? atoi(pace + 10) : 0;
    p->due = now_ms() + p->pace_ms;
    if (active_count == MOST) return drop(p), 0;
    p->is_streaming = 1;
    p->at = active_count;
    active[active_count++] = p;
    return put_text(p, head_and_token);
}

static void take(struct peer *p) {
    ssize_t n = recv(p->fd, p->buffer + p->used, BUFFER - 1 - p->used, 0);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN) drop(p);
        return;
    }
    p->used += n;
    p->buffer[p->used] = 0;
    char *split;
    while ((split = strstr(p->buffer, "\r\n\r\n"))) {
        char *length = strcasestr(p->buffer, "\r\ncontent-length:");
        int size = length && length < split ? atoi(length + 17) : 0;
        int whole = (int)(split + 4 - p->buffer) + size;
        if (p->used < whole) return;
        char kept = p->buffer[whole];
        split[2] = 0;
        p->buffer[whole] = 0;
        if (!answer(p, p->buffer, split + 4)) return;
        p->buffer[whole] = kept;
        memmove(p->buffer, p->buffer + whole, p->used - whole + 1);
        p->used -= whole;
    }
}

static void accept_all(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MOST * 4) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct peer *p = calloc(1, sizeof *p);
        p->fd = fd;
        peers[fd] = p;
        connections++;
        watch(p, EPOLL_CTL_ADD, EPOLLIN);
    }
}

static void write_texts(void) {
    const char *event = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"stub\","
                        "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n";
    sprintf(token, "%zx\r\n%s\r\n", strlen(event), event);
    sprintf(head_and_token, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%s", token);
    const char *body = "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"stub\",\"choices\":[{\"index\":0,"
                       "\"message\":{\"role\":\"assistant\",\"content\":\"The capital of France is Paris.\"},\"finish_reason\":\"stop\"}],"
                       "\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":8,\"total_tokens\":20}}";
    sprintf(plain, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(body), body);
}

static int patience(void) {
    double soonest = 1000, now = now_ms();
    for (int i = 0; i < active_count; i++) {
        if (active[i]->is_blocked) continue;
        if (!active[i]->pace_ms) return 0;
        if (active[i]->due - now < soonest) soonest = active[i]->due - now;
    }
    return soonest < 0 ? 0 : (int)soonest + 1;
}

int main(int count, char **words) {
    key = count > 1 ? words[1] : "";
    write_texts();
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    place.sin_port = htons(count > 2 ? atoi(words[2]) : 0);
    socklen_t size = sizeof place;
    if (bind(listener, (void *)&place, size) || listen(listener, 4096)) return perror("listen"), 1;
    getsockname(listener, (void *)&place, &size);
    printf("%d\n", ntohs(place.sin_port));
    fflush(stdout);
    poller = epoll_create1(0);
    struct epoll_event events[256], first = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &first);
    for (;;) {
        int ready = epoll_wait(poller, events, 256, patience());
        for (int i = 0; i < ready; i++) {
            if (events[i].data.fd == listener) {
                accept_all(listener);
                continue;
            }
            struct peer *p = peers[events[i].data.fd];
            if (p && events[i].events & EPOLLOUT && p->is_blocked) {
                p->is_blocked = 0;
                watch(p, EPOLL_CTL_MOD, EPOLLIN);
                if (!put(p, p->pending, p->pending_length)) continue;
            }
            if (p && events[i].events & ~EPOLLOUT) take(p);
        }
        double now = now_ms();
        for (int i = active_count - 1; i >= 0; i--)
            if (i < active_count && !active[i]->is_blocked && active[i]->due <= now) step(active[i]);
    }
}
