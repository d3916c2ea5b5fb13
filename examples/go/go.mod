module baton-example

go 1.19

require (
	google.golang.org/grpc v1.59.0
	google.golang.org/protobuf v1.33.0
)
