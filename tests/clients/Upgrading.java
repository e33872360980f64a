import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;

/** Sends requests by Java's own client with its defaults; prints one line per answer. */
public class Upgrading {
    private static final String SMALL = "{\"inputs\": \"the king\"}";
    private static final String LARGE = "{\"inputs\": \"the king\"" + " ".repeat(300_000) + "}";

    public static void main(String[] arguments) throws Exception {
        URI embed = URI.create(arguments[0] + "/embed");
        System.out.println("java " + System.getProperty("java.version"));
        List<BodyPublisher> bodies = List.of(
            BodyPublishers.ofString(SMALL),
            BodyPublishers.ofString(LARGE),
            BodyPublishers.ofInputStream( // of a length that the client does not know
                () -> new ByteArrayInputStream(SMALL.getBytes(StandardCharsets.UTF_8))));
        for (BodyPublisher body : bodies) {
            HttpClient client = HttpClient.newHttpClient(); // opens a connection, with its offer
            for (int repeat = 0; repeat < 3; repeat++) {
                print(client.send(post(embed, body, false), BodyHandlers.ofString()));
            }
        }
        HttpClient waiting = HttpClient.newHttpClient();
        print(waiting.send(post(embed, bodies.get(0), true), BodyHandlers.ofString()));
        HttpClient busy = HttpClient.newHttpClient();
        List<CompletableFuture<HttpResponse<String>>> answers = new ArrayList<>();
        for (int number = 0; number < 16; number++) {
            answers.add(busy.sendAsync(post(embed, bodies.get(0), false), BodyHandlers.ofString()));
        }
        for (CompletableFuture<HttpResponse<String>> answer : answers) {
            print(answer.get());
        }
    }

    private static HttpRequest post(URI address, BodyPublisher body, boolean waits) {
        return HttpRequest.newBuilder(address)
            .header("Content-Type", "application/json")
            .expectContinue(waits)
            .POST(body)
            .build();
    }

    private static void print(HttpResponse<String> answer) {
        System.out.println(answer.version() + " " + answer.statusCode() + " " + answer.body());
    }
}
