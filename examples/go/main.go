// Asks Baton over gRPC: the models, a text to continue, a conversation, and one that calls a tool.
// Usage: go run . [HOST:PORT]. `make generate` makes the package batonpb.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "baton-example/batonpb"
)

var weather = &pb.Tool{
	Name:        "get_weather",
	Description: "Get the current weather in a given location",
	Parameters:  `{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}`,
}

// getWeather is what a real tool would look up.
func getWeather(arguments string) (string, error) {
	var given struct{ City string }
	if err := json.Unmarshal([]byte(arguments), &given); err != nil {
		return "", err
	}
	return fmt.Sprintf(`{"city": %q, "temperature": 21, "condition": "sunny"}`, given.City), nil
}

func listModels(ctx context.Context, client pb.InferenceClient) error {
	answer, err := client.ListModels(ctx, &pb.ListModelsRequest{})
	if err != nil {
		return err
	}
	for _, model := range answer.Models {
		fmt.Printf("model: %s, %d tokens\n", model.Id, model.ContextTokens)
	}
	return nil
}

func generate(ctx context.Context, client pb.InferenceClient, text string) error {
	stream, err := client.Generate(ctx, &pb.GenerateRequest{
		Prompt:      &pb.GenerateRequest_Text{Text: text},
		MaxTokens:   proto.Int64(20),
		Temperature: proto.Float64(0),
	})
	if err != nil {
		return err
	}
	fmt.Print("generate: ")
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			fmt.Println()
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(response.Text)
	}
}

// chat returns the assistant's answer, printed as it comes.
func chat(
	ctx context.Context, client pb.InferenceClient, messages []*pb.ChatMessage, tools ...*pb.Tool,
) (*pb.ChatMessage, error) {
	stream, err := client.Chat(ctx, &pb.ChatRequest{
		Messages: messages, Tools: tools, MaxTokens: proto.Int64(200), Temperature: proto.Float64(0),
	})
	if err != nil {
		return nil, err
	}
	answer, text := &pb.ChatMessage{Role: "assistant"}, strings.Builder{}
	fmt.Print("chat: ")
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			fmt.Println()
			answer.Content = text.String()
			return answer, nil
		}
		if err != nil {
			return nil, err
		}
		fmt.Print(response.Text)
		text.WriteString(response.Text)
		answer.ToolCalls = append(answer.ToolCalls, response.ToolCalls...)
	}
}

func chatWithTool(ctx context.Context, client pb.InferenceClient, question string) error {
	messages := []*pb.ChatMessage{{Role: "user", Content: question}}
	for {
		answer, err := chat(ctx, client, messages, weather)
		if err != nil || len(answer.ToolCalls) == 0 {
			return err
		}
		messages = append(messages, answer)
		for _, call := range answer.ToolCalls {
			fmt.Printf("call: %s(%s)\n", call.Name, call.Arguments)
			result, err := getWeather(call.Arguments)
			if err != nil {
				return err
			}
			messages = append(messages, &pb.ChatMessage{Role: "tool", ToolCallId: call.Id, Content: result})
		}
	}
}

func run(address string) error {
	connection, err := grpc.Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	client := pb.NewInferenceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if key := os.Getenv("BATON_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	if err := listModels(ctx, client); err != nil {
		return err
	}
	if err := generate(ctx, client, "Once upon a time"); err != nil {
		return err
	}
	if _, err := chat(ctx, client, []*pb.ChatMessage{{Role: "user", Content: "What is 12 plus 30?"}}); err != nil {
		return err
	}
	return chatWithTool(ctx, client, "What is the weather in Paris?")
}

func main() {
	address := "127.0.0.1:8001"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if err := run(address); err != nil {
		fmt.Fprintf(os.Stderr, "\n%s: %s\n", status.Code(err), status.Convert(err).Message())
		os.Exit(1)
	}
}
