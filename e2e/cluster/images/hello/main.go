// Hello is what the cluster's own tests run in pods: a server that says which pod answered, and what such a test does
// from inside of one. It is the only file of its image.
//
//	hello serve ADDRESS
//	hello get [-n TIMES] [-ca FILE] [-token FILE] URL
//	hello cat FILE
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const limit = 5 * time.Second

func main() {
	log.SetFlags(0)
	if len(os.Args) < 3 {
		log.Fatal("usage: hello serve ADDRESS | get [-n TIMES] [-ca FILE] [-token FILE] URL | cat FILE")
	}
	var err error
	switch arguments := os.Args[2:]; os.Args[1] {
	case "serve":
		err = serve(arguments[0])
	case "get":
		err = get(arguments)
	case "cat":
		err = cat(arguments[0])
	default:
		err = fmt.Errorf("unknown command %q", os.Args[1])
	}
	if err != nil {
		log.Fatal(err)
	}
}

func serve(address string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	server := &http.Server{Addr: address, ReadHeaderTimeout: limit}
	server.Handler = http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		log.Printf("%s asks for %s", request.RemoteAddr, request.URL.Path)
		fmt.Fprintln(answer, name)
	})
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	context.AfterFunc(stop, func() { server.Close() })
	log.Printf("%s serves on %s", name, address)
	if err := server.ListenAndServe(); err != http.ErrServerClosed {
		return err
	}
	return nil
}

// Each request has a connection of its own, so that a Service chooses each time.
func get(arguments []string) error {
	flags := flag.NewFlagSet("get", flag.ExitOnError)
	times := flags.Int("n", 1, "how often")
	ca := flags.String("ca", "", "file of the certificates to trust")
	token := flags.String("token", "", "file of the bearer token to send")
	flags.Parse(arguments)
	trust := &tls.Config{}
	if *ca != "" {
		pem, err := os.ReadFile(*ca)
		if err != nil {
			return err
		}
		trust.RootCAs = x509.NewCertPool()
		trust.RootCAs.AppendCertsFromPEM(pem)
	}
	client := &http.Client{Timeout: limit, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: trust}}
	for range *times {
		request, err := http.NewRequest(http.MethodGet, flags.Arg(0), nil)
		if err != nil {
			return err
		}
		if *token != "" {
			bearer, err := os.ReadFile(*token)
			if err != nil {
				return err
			}
			request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(bearer)))
		}
		if err := show(client, request); err != nil {
			return err
		}
	}
	return nil
}

func show(client *http.Client, request *http.Request) error {
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", request.URL, answer.Status)
	}
	_, err = io.Copy(os.Stdout, answer.Body)
	return err
}

func cat(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(text)
	return err
}
