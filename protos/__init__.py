"""The wire: .proto files and the code generated from them (`make protos`); nothing here is written by hand."""
