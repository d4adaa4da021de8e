// Command server is grpc-go with the behaviours that the tests of the gRPC client ask for; see real_servers.py.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const largest = 1 << 30

// rawCodec passes messages as bytes, so that no generated code is needed.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

type order struct {
	Do     string `json:"do"`
	Count  int    `json:"count"`
	Size   int    `json:"size"`
	Status uint32 `json:"status"`
	Text   string `json:"text"`
	Name   string `json:"name"`
	Pause  int    `json:"pause_ms"`
}

var cancelled atomic.Int64

func send(stream grpc.ServerStream, message []byte) error { return stream.SendMsg(&message) }

func behave(_ any, stream grpc.ServerStream) error {
	var request []byte
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	var wanted order
	if err := json.Unmarshal(request, &wanted); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	switch wanted.Do {
	case "stream", "fail":
		message := make([]byte, wanted.Size)
		if wanted.Do == "stream" && wanted.Text != "" {
			message = []byte(wanted.Text)
		}
		for number := 0; number < wanted.Count; number++ {
			if err := send(stream, message); err != nil {
				return err
			}
		}
		if wanted.Do == "fail" {
			return status.Error(codes.Code(wanted.Status), wanted.Text)
		}
		return nil
	case "wait":
		if err := send(stream, []byte("begun")); err != nil {
			return err
		}
		<-stream.Context().Done()
		cancelled.Add(1)
		return stream.Context().Err()
	case "cancelled":
		return send(stream, []byte(fmt.Sprint(cancelled.Load())))
	case "deadline":
		end, has := stream.Context().Deadline()
		if !has {
			return send(stream, []byte("none"))
		}
		return send(stream, []byte(fmt.Sprint(time.Until(end).Milliseconds())))
	case "metadata":
		found, _ := metadata.FromIncomingContext(stream.Context())
		return send(stream, []byte(strings.Join(found.Get(wanted.Name), ",")))
	case "headers":
		filling := metadata.Pairs("x-filling", strings.Repeat("f", wanted.Size))
		stream.SetTrailer(filling)
		if err := stream.SendHeader(filling); err != nil {
			return err
		}
		return send(stream, []byte("filled"))
	case "collect", "echo":
		return receive(stream, wanted)
	}
	return status.Error(codes.InvalidArgument, "unknown order")
}

func receive(stream grpc.ServerStream, wanted order) error {
	count, size := 0, 0
	for {
		time.Sleep(time.Duration(wanted.Pause) * time.Millisecond)
		var message []byte
		err := stream.RecvMsg(&message)
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		count, size = count+1, size+len(message)
		if wanted.Do == "echo" {
			if err := send(stream, message); err != nil {
				return err
			}
		}
	}
	if wanted.Do == "echo" {
		return nil
	}
	return send(stream, []byte(fmt.Sprintf("%d messages of %d bytes", count, size)))
}

func answer(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	var message []byte
	if err := decode(&message); err != nil {
		return nil, err
	}
	return &message, nil
}

func main() {
	age := flag.Int("max-age-ms", 0, "age at which a connection is told to go away")
	streams := flag.Uint("max-streams", 0, "streams on one connection")
	flag.Parse()
	encoding.RegisterCodecV2(rawCodec{})
	options := []grpc.ServerOption{grpc.MaxRecvMsgSize(largest), grpc.MaxSendMsgSize(largest)}
	if *age > 0 {
		options = append(options, grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionAge: time.Duration(*age) * time.Millisecond, MaxConnectionAgeGrace: 30 * time.Second,
		}))
	}
	if *streams > 0 {
		options = append(options, grpc.MaxConcurrentStreams(uint32(*streams)))
	}
	server := grpc.NewServer(options...)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "backend.Backend",
		Methods:     []grpc.MethodDesc{{MethodName: "Predict", Handler: answer}},
		Streams: []grpc.StreamDesc{
			{StreamName: "PredictStream", Handler: behave, ServerStreams: true, ClientStreams: true},
		},
	}, nil)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	go func() { // whoever started it is gone, or asks for an orderly end
		line := make([]byte, 1)
		if count, _ := os.Stdin.Read(line); count == 0 {
			os.Exit(0)
		}
		server.GracefulStop()
	}()
	if err := server.Serve(listener); err != nil {
		log.Fatal(err)
	}
}
