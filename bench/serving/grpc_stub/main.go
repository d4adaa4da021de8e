// Command grpc_stub is a fast engine that speaks LocalAI's gRPC protocol, and a client that calls it directly.
//
// Without arguments it serves: Predict answers with fixed words, PredictStream sends as many tokens as the request
// asks for, as fast as the machine can; it prints its port. With `load PORT STREAMS SECONDS TOKENS PAUSE` it calls such
// an engine, with a pause in microseconds after each call, and prints one line of JSON; TOKENS 0 calls Predict. Messages
// pass as bytes, so no generated code is needed.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"sort"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

const (
	tokensField  = 4 // of PredictOptions
	messageField = 1 // of Reply
	countField   = 2 // of Reply
)

type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

func reply(text string) []byte {
	made := protowire.AppendTag(nil, messageField, protowire.BytesType)
	made = protowire.AppendString(made, text)
	made = protowire.AppendTag(made, countField, protowire.VarintType)
	return protowire.AppendVarint(made, 1)
}

// wanted is the number of tokens that a request asks for.
func wanted(request []byte) int {
	for len(request) > 0 {
		number, kind, length := protowire.ConsumeTag(request)
		if length < 0 {
			break
		}
		request = request[length:]
		if number == tokensField && kind == protowire.VarintType {
			value, _ := protowire.ConsumeVarint(request)
			return int(value)
		}
		length = protowire.ConsumeFieldValue(number, kind, request)
		if length < 0 {
			break
		}
		request = request[length:]
	}
	return 64
}

func predict(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	var request []byte
	if err := decode(&request); err != nil {
		return nil, err
	}
	answer := reply("The capital of France is Paris.")
	return &answer, nil
}

func stream(_ any, stream grpc.ServerStream) error {
	var request []byte
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	token := reply(" token")
	for left := wanted(request); left > 0; left-- {
		if err := stream.SendMsg(&token); err != nil {
			return err
		}
	}
	return nil
}

func serve() {
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "backend.Backend",
		Methods:     []grpc.MethodDesc{{MethodName: "Predict", Handler: predict}},
		Streams:     []grpc.StreamDesc{{StreamName: "PredictStream", Handler: stream, ServerStreams: true}},
	}, nil)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	log.Fatal(server.Serve(listener))
}

func number(text string) float64 {
	value, err := strconv.ParseFloat(text, 64)
	if err != nil {
		log.Fatal(err)
	}
	return value
}

// call makes one call and returns how many tokens it got.
func call(connection *grpc.ClientConn, tokens int) (int, error) {
	request := protowire.AppendTag(nil, tokensField, protowire.VarintType)
	request = protowire.AppendVarint(request, uint64(tokens))
	if tokens == 0 {
		var answer []byte
		return 0, connection.Invoke(context.Background(), "/backend.Backend/Predict", &request, &answer)
	}
	opened, err := connection.NewStream(context.Background(), &grpc.StreamDesc{ServerStreams: true}, "/backend.Backend/PredictStream")
	if err == nil {
		err = opened.SendMsg(&request)
	}
	if err == nil {
		err = opened.CloseSend()
	}
	for count := 0; ; count++ {
		var message []byte
		if err == nil {
			err = opened.RecvMsg(&message)
		}
		if err == io.EOF {
			return count, nil
		}
		if err != nil {
			return count, err
		}
	}
}

func load(port string, streams int, seconds float64, tokens int, pause time.Duration) {
	connection, err := grpc.NewClient("127.0.0.1:"+port, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	var group sync.WaitGroup
	var lock sync.Mutex
	var latencies []int
	var got, errors atomic.Int64
	began := time.Now()
	end := began.Add(time.Duration(seconds * float64(time.Second)))
	for range streams {
		group.Go(func() {
			var mine []int
			for time.Now().Before(end) {
				asked := time.Now()
				count, err := call(connection, tokens)
				if err != nil || count != tokens {
					errors.Add(1)
				}
				got.Add(int64(count))
				mine = append(mine, int(time.Since(asked).Microseconds()))
				if pause > 0 {
					time.Sleep(pause)
				}
			}
			lock.Lock()
			latencies = append(latencies, mine...)
			lock.Unlock()
		})
	}
	group.Wait()
	sort.Ints(latencies)
	count := len(latencies)
	err = json.NewEncoder(os.Stdout).Encode(map[string]any{
		"seconds": time.Since(began).Seconds(), "answers": count, "tokens": got.Load(), "errors": errors.Load(),
		"p50_us": latencies[count/2], "p99_us": latencies[count*99/100],
	})
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	encoding.RegisterCodecV2(rawCodec{})
	if len(os.Args) == 7 && os.Args[1] == "load" {
		pause := time.Duration(number(os.Args[6])) * time.Microsecond
		load(os.Args[2], int(number(os.Args[3])), number(os.Args[4]), int(number(os.Args[5])), pause)
		return
	}
	serve()
}
