/* The load generator of bench/serve.py: HTTP/1.1, one thread, epoll, keep-alive connections.

   Each connection sends a chat, reads the answer to its end (content-length or chunks), checks it, and sends the next
   one. Prints one line of JSON: answers, tokens, latencies in microseconds, errors, own CPU time.
   Usage: load PORT CONNECTIONS SECONDS TOKENS PACE_MS [BEARER [MODEL]]; TOKENS 0 asks for plain answers. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 4096, BUFFER = 65536, SAMPLES = 4000000 };
enum state { HEAD, SIZE, BODY, LINE, LENGTH };

struct line {
    int fd, used, events, has_newline, status;
    enum state state;
    long left;
    double began, first;
    char head[8192];
};

static struct line lines[MOST];
static int wanted_tokens, poller, port;
static long answers, tokens, errors, reconnects;
static unsigned *latencies, *firsts;
static char request[2048], buffer[BUFFER];
static int request_length;
static double finish;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void ask(struct line *l) {
    l->state = HEAD;
    l->used = l->events = l->has_newline = 0;
    l->first = 0;
    l->began = now_us();
    if (send(l->fd, request, request_length, MSG_NOSIGNAL) != request_length) errors++;
}

static void dial(struct line *l) {
    int one = 1;
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    l->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(l->fd, (void *)&place, sizeof place)) {
        perror("connect");
        exit(1);
    }
    setsockopt(l->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = l};
    epoll_ctl(poller, EPOLL_CTL_ADD, l->fd, &e);
    ask(l);
}

static void redial(struct line *l) {
    close(l->fd);
    reconnects++;
    dial(l);
}

static void complete(struct line *l) {
    int expected = wanted_tokens ? wanted_tokens + 1 : 0;
    if (l->status != 200 || (expected && l->events < expected)) errors++;
    if (answers < SAMPLES) {
        latencies[answers] = (unsigned)(now_us() - l->began);
        firsts[answers] = (unsigned)(l->first - l->began);
    }
    answers++;
    ask(l);
}

static void count_events(struct line *l, const char *bytes, long length) {
    const char *at = bytes, *stop = bytes + length;
    if (l->has_newline && length && *at == '\n') {
        l->events++;
        tokens++;
        at++;
    }
    while (at < stop && (at = memchr(at, '\n', stop - at))) {
        at++;
        if (at < stop && *at == '\n') {
            l->events++;
            tokens++;
            at++;
        }
    }
    l->has_newline = length && bytes[length - 1] == '\n' && !(length > 1 && bytes[length - 2] == '\n');
}

/* Reads the head of an answer; how many bytes of `bytes` belong to it. */
static long read_head(struct line *l, const char *bytes, long length) {
    long copied = length < (long)sizeof l->head - 1 - l->used ? length : (long)sizeof l->head - 1 - l->used;
    memcpy(l->head + l->used, bytes, copied);
    l->head[l->used + copied] = 0;
    char *split = strstr(l->head, "\r\n\r\n");
    if (!split) {
        l->used += copied;
        return length;
    }
    long taken = split + 4 - l->head - l->used;
    split[2] = 0;
    l->status = atoi(l->head + 9);
    l->first = now_us();
    char *given = strcasestr(l->head, "\r\ncontent-length:");
    l->state = given ? LENGTH : SIZE;
    l->left = given ? atol(given + 17) : 0;
    return taken;
}

static void feed(struct line *l, const char *bytes, long length) {
    long at = 0;
    while (at < length) {
        long rest = length - at;
        if (l->state == HEAD) {
            at += read_head(l, bytes + at, rest);
        } else if (l->state == SIZE) {
            char c = bytes[at++];
            if (c == '\n') l->state = l->left ? BODY : LINE;
            else if (c != '\r') l->left = l->left * 16 + (c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
            if (l->state == LINE) l->left = -1; /* the empty line after the last chunk */
        } else if (l->state == LINE) {
            if (bytes[at++] != '\n') continue;
            if (l->left < 0) {
                complete(l);
                return;
            }
            l->state = SIZE;
            l->left = 0;
        } else {
            long part = rest < l->left ? rest : l->left;
            if (l->state == BODY) count_events(l, bytes + at, part);
            at += part;
            l->left -= part;
            if (l->left == 0 && l->state == BODY) l->state = LINE;
            else if (l->left == 0) {
                complete(l);
                return;
            }
        }
    }
}

static int by_size(const void *a, const void *b) { return *(unsigned *)a < *(unsigned *)b ? -1 : *(unsigned *)a > *(unsigned *)b; }

static unsigned share(unsigned *sorted, long count, double part) { return count ? sorted[(long)((count - 1) * part)] : 0; }

int main(int count, char **words) {
    if (count < 6) return fprintf(stderr, "usage: load PORT CONNECTIONS SECONDS TOKENS PACE_MS [BEARER [MODEL]]\n"), 2;
    port = atoi(words[1]);
    int many = atoi(words[2]);
    double seconds = atof(words[3]);
    wanted_tokens = atoi(words[4]);
    if (many > MOST) return 2;
    char body[512], more[128] = "";
    if (wanted_tokens) sprintf(more, ",\"stream\":true,\"max_tokens\":%d", wanted_tokens);
    if (atoi(words[5])) sprintf(more + strlen(more), ",\"pace_ms\":%s", words[5]);
    int size = sprintf(body, "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"What is the capital of France?\"}]%s}", count > 7 ? words[7] : "stub", more);
    request_length = sprintf(request,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: load\r\naccept: */*\r\n"
        "content-type: application/json\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s",
        port, count > 6 ? words[6] : "none", size, body);
    latencies = calloc(SAMPLES, sizeof *latencies);
    firsts = calloc(SAMPLES, sizeof *firsts);
    poller = epoll_create1(0);
    double began = now_us();
    finish = began + seconds * 1e6;
    for (int i = 0; i < many; i++) dial(&lines[i]);
    struct epoll_event events[256];
    while (now_us() < finish) {
        int ready = epoll_wait(poller, events, 256, 50);
        for (int i = 0; i < ready; i++) {
            struct line *l = events[i].data.ptr;
            ssize_t n = recv(l->fd, buffer, BUFFER, 0);
            if (n > 0) feed(l, buffer, n);
            else {
                errors++;
                redial(l);
            }
        }
    }
    double took = (now_us() - began) / 1e6;
    long kept = answers < SAMPLES ? answers : SAMPLES;
    qsort(latencies, kept, sizeof *latencies, by_size);
    qsort(firsts, kept, sizeof *firsts, by_size);
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    printf("{\"seconds\":%.4f,\"answers\":%ld,\"tokens\":%ld,\"errors\":%ld,\"reconnects\":%ld,\"p50_us\":%u,\"p99_us\":%u,"
           "\"first_p50_us\":%u,\"cpu_seconds\":%.4f}\n",
           took, answers, tokens, errors, reconnects, share(latencies, kept, 0.5), share(latencies, kept, 0.99),
           share(firsts, kept, 0.5),
           used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
    return 0;
}
